"""The token side of a retrieval question: a prompt of exactly the asked length for every depth."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, islice

from ctxext.data.encoding import Encoder, no_tokens
from ctxext.errors import CtxextError

_BLOCK = 128


@dataclass(frozen=True)
class Pieces:
    """The text of one retrieval question, before it is cut to a token length.

    Units are joined by simple concatenation, so each piece carries its own separators.

    Attributes:
        opening: The instruction that stands before the haystack.
        haystack: Endless filler units: a sentence, a record, a document.
        needles: Units that must all be in the haystack. The first is the one asked for and goes at the wanted depth;
            the others are distractors, to be spread evenly at random.
        question: Stands after the haystack and ends right where the answer starts.
        answer: Begins with its own leading space if the text needs one.
        padding: A unit of one token that may be repeated before the question to reach an exact length, for filler whose
            units cannot be cut. Empty if filler may be cut anywhere.
        answers: Every right answer, where a task scores free text and has several; empty if `answer` is the only one.
        asks: Question and answer of every needle, where any of them can be asked for; empty if only the first can.
        wanted: What an answer must hold, in any order, where it is a list; empty if `answers` says what is right.
        places: Where each needle goes, from 0 to 1, where that is part of the question; they keep this order.
    """

    opening: str
    haystack: Iterator[str]
    needles: tuple[str, ...]
    question: str
    answer: str
    padding: str = ""
    answers: tuple[str, ...] = ()
    asks: tuple[tuple[str, str], ...] = ()
    wanted: tuple[str, ...] = ()
    places: tuple[float, ...] = ()


@dataclass(frozen=True)
class Prompt:
    """One question at one depth.

    Attributes:
        ids: Token ids, the answer included.
        num_answer: How many of the last ids are the answer.
        answers: Every right answer, as text.
        wanted: What an answer must hold, where it is a list.
    """

    ids: list[int]
    num_answer: int
    answers: tuple[str, ...]
    wanted: tuple[str, ...] = ()


@dataclass(frozen=True)
class Ask:
    """A question behind the haystack and its answer, in tokens, and the answer as text."""

    tail: list[int]
    answer: list[int]
    text: str

    @property
    def size(self) -> int:
        """How many tokens both take."""
        return len(self.tail) + len(self.answer)


@dataclass(frozen=True)
class Parts:
    """The token ids of a question's pieces, without its haystack."""

    head: list[int]
    needles: list[list[int]]
    asks: list[Ask]

    @property
    def size(self) -> int:
        """How many tokens the longest of the questions takes with an empty haystack."""
        return len(self.head) + sum(map(len, self.needles)) + max(ask.size for ask in self.asks)


def encode_parts(pieces: Pieces, encoder: Encoder, *, answer_room: int = 0) -> Parts:
    """Encode everything but the haystack.

    Args:
        pieces: The text of the question.
        encoder: Its tokenizer.
        answer_room: Keep at least so many tokens for an answer that is generated.

    Raises:
        CtxextError: the tokenizer makes nothing of an answer.
    """
    asks = []
    for question, text in pieces.asks or ((pieces.question, pieces.answer),):
        head, tail = encoder.frame(pieces.opening, question)
        answer = encoder.piece(text)
        if not answer:
            raise no_tokens(text)
        asks.append(Ask(tail, answer + answer[-1:] * (answer_room - len(answer)), text))
    return Parts(head, encoder.pieces(pieces.needles), asks)


def lay_out(
    pieces: Pieces, parts: Parts, encoder: Encoder, length: int, depths: Sequence[float], rng: random.Random
) -> list[Prompt]:
    """Prompts of exactly `length` tokens, one for each depth, with the same haystack.

    Where any needle can be asked for, one text serves several depths: a needle lies at each of them, each is asked for
    in a prompt of its own, and the others are its distractors. Depths are dealt out to as few texts as possible, so
    that those of one text lie far apart. Needles that are left over go anywhere.

    A needle goes at the boundary between two units that is nearest to its depth, counted in tokens of the haystack.
    Filler that cannot be cut is made up with padding before the question.

    Args:
        pieces: The text of the question; its haystack is read as far as needed.
        parts: The same, encoded.
        encoder: The tokenizer.
        length: Tokens of the prompt, answer included.
        depths: Where needles go, from 0 (the beginning of the haystack) to 1 (its end).
        rng: Places the needles that are left over.

    Raises:
        CtxextError: the question does not fit, or the haystack is empty or ends too early.
    """
    room = length - parts.size
    if room < 0:
        raise too_short(length, parts.size)
    # Questions differ by a few tokens. All have the same haystack, and the shorter ones a little more filler behind it.
    longest = max(ask.size for ask in parts.asks)
    units, rest = _fill(pieces, encoder, room, longest - min(ask.size for ask in parts.asks))
    anywhere = [rng.random() for _ in parts.needles]
    num_texts = -(-len(depths) // len(parts.asks))
    prompts = []
    for number, _ in enumerate(depths):
        text, asked = number % num_texts, number // num_texts
        places = pieces.places or [*depths[text::num_texts], *anywhere][: len(parts.needles)]
        haystack = _hide(units, parts.needles, places)
        ask = parts.asks[asked]
        surplus = length - len(parts.head) - len(haystack) - ask.size
        ids = [*parts.head, *haystack, *rest[:surplus], *ask.tail, *ask.answer]
        if len(ids) != length:
            raise AssertionError(f"a prompt of {len(ids)} tokens where {length} were asked for")
        prompts.append(Prompt(ids, len(ask.answer), pieces.answers or (ask.text,), pieces.wanted))
    return prompts


def too_short(length: int, minimum: int, task: str = "The question") -> CtxextError:
    """The refusal of a length that does not even hold the question."""
    return CtxextError(
        f"{task} needs at least {minimum} tokens, but a length of {length} was asked for.",
        hint=f"Ask for --lengths {minimum} or more.",
    )


def _hide(units: Sequence[list[int]], needles: Sequence[list[int]], depths: Sequence[float]) -> list[int]:
    """All tokens of the units, with each needle at the boundary between units that is nearest to its depth."""
    ends = [0, *accumulate(map(len, units))]
    places = [min(range(len(ends)), key=lambda place: abs(ends[place] - depth * ends[-1])) for depth in depths]
    haystack: list[int] = []
    for place in range(len(ends)):
        haystack += chain.from_iterable(needle for needle, at in zip(needles, places, strict=True) if at == place)
        haystack += units[place] if place < len(units) else []
    return haystack


def _fill(pieces: Pieces, encoder: Encoder, room: int, more: int) -> tuple[list[list[int]], list[int]]:
    """Filler units that take up the room, the last one cut where that is allowed, and what may follow them.

    What follows is the rest of the filler, at least `more` tokens of it, or padding where units cannot be cut.
    """
    units: list[list[int]] = []
    haystack = iter(pieces.haystack)
    used = 0
    while used < room + more:
        texts = list(islice(haystack, _BLOCK))
        found = encoder.pieces(texts)
        if not any(found):
            raise CtxextError("The haystack is empty or too short for this length.", hint="Give a longer one.")
        units += found
        used += sum(map(len, found))
    ends = list(accumulate(map(len, units)))
    whole = sum(end <= room for end in ends)
    taken = ends[whole - 1] if whole else 0
    if pieces.padding:
        if not encoder.piece(pieces.padding):
            raise no_tokens(pieces.padding)
        return units[:whole], encoder.piece(pieces.padding)[-1:] * (room - taken + more)
    following = list(chain.from_iterable(units[whole:]))
    if room > taken:
        return [*units[:whole], following[: room - taken]], following[room - taken :]
    return units[:whole], following
