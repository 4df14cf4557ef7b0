"""The token side of a retrieval question: a prompt of exactly the asked length for every depth."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, islice

from ctxext.errors import CtxextError
from ctxext.evaluate.encoding import Encoder
from ctxext.evaluate.tasks import Pieces

_BLOCK = 128


@dataclass(frozen=True)
class Prompt:
    """One question at one depth.

    Attributes:
        ids: Token ids, the answer included.
        num_answer: How many of the last ids are the answer.
        num_shared: How many of the first ids are the same at every depth of this question.
        answers: Every right answer, as text.
    """

    ids: list[int]
    num_answer: int
    num_shared: int
    answers: tuple[str, ...]


@dataclass(frozen=True)
class Parts:
    """The token ids of a question's pieces, without its haystack."""

    head: list[int]
    needle: list[int]
    distractors: list[list[int]]
    tail: list[int]
    answer: list[int]

    @property
    def size(self) -> int:
        """How many tokens the question takes with an empty haystack."""
        return sum(map(len, (self.head, self.needle, *self.distractors, self.tail, self.answer)))


def encode_parts(pieces: Pieces, encoder: Encoder, *, answer_room: int = 0) -> Parts:
    """Encode everything but the haystack.

    Args:
        pieces: The text of the question.
        encoder: Its tokenizer.
        answer_room: Keep at least so many tokens for an answer that is generated.
    """
    head, tail = encoder.frame(pieces.opening, pieces.question)
    needle, *distractors = encoder.pieces(pieces.needles)
    answer = encoder.piece(pieces.answer)
    answer = answer + answer[-1:] * (answer_room - len(answer))
    return Parts(head, needle, distractors, tail, answer)


def lay_out(
    pieces: Pieces, parts: Parts, encoder: Encoder, length: int, depths: Sequence[float], rng: random.Random
) -> list[Prompt]:
    """Prompts of exactly `length` tokens, one for each depth, with the same haystack.

    The needle goes at the boundary between two units that is nearest to its depth, counted in tokens of the haystack.
    Distractors go between units at random. Filler that cannot be cut is made up with padding before the question.

    Args:
        pieces: The text of the question; its haystack is read as far as needed.
        parts: The same, encoded.
        encoder: The tokenizer.
        length: Tokens of the prompt, answer included.
        depths: Where the needle goes, from 0 (the beginning of the haystack) to 1 (its end).
        rng: Places the distractors.

    Raises:
        CtxextError: the question does not fit, or the haystack is empty or ends too early.
    """
    room = length - parts.size
    if room < 0:
        raise too_short(length, parts.size)
    units = _fill(pieces, encoder, room)
    padding = [encoder.piece(pieces.padding)[-1]] * (room - sum(map(len, units))) if pieces.padding else []
    for distractor in parts.distractors:
        units.insert(rng.randint(0, len(units)), distractor)
    ends = [0, *accumulate(map(len, units))]
    haystack = list(chain.from_iterable(units))
    prompts = []
    for depth in depths:
        at = min(ends, key=lambda end: abs(end - depth * len(haystack)))
        ids = [*parts.head, *haystack[:at], *parts.needle, *haystack[at:], *padding, *parts.tail, *parts.answer]
        if len(ids) != length:
            raise AssertionError(f"a prompt of {len(ids)} tokens where {length} were asked for")
        prompts.append(Prompt(ids, len(parts.answer), len(parts.head) + at, pieces.answers or (pieces.answer,)))
    return prompts


def too_short(length: int, minimum: int, task: str = "The question") -> CtxextError:
    """The refusal of a length that does not even hold the question."""
    return CtxextError(
        f"{task} needs at least {minimum} tokens, but a length of {length} was asked for.",
        hint=f"Ask for --lengths {minimum} or more.",
    )


def _fill(pieces: Pieces, encoder: Encoder, room: int) -> list[list[int]]:
    """Filler units that take up the room, the last one cut where that is allowed."""
    units: list[list[int]] = []
    haystack = iter(pieces.haystack)
    while room > 0:
        texts = list(islice(haystack, _BLOCK))
        if not texts or not any(unit := encoder.pieces(texts)):
            raise CtxextError("The haystack is empty or too short for this length.", hint="Give a longer one.")
        for ids in unit:
            if len(ids) > room:
                return units if pieces.padding else [*units, ids[:room]]
            units.append(ids)
            room -= len(ids)
    return units
