"""Retrieval questions as tokens: a prompt of exactly the given length for every depth."""

import dataclasses
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, islice, repeat
from typing import NamedTuple, Self

from ctxext.data.encoding import Encoder, no_tokens, split_question
from ctxext.errors import CtxextError

_BLOCK, _BLOCK_OF_PAGES = 128, 8


Message = dict[str, str]
"""The role and the content of a message."""


class QuestionText(NamedTuple):
    """One of several questions about a text, with its correct answers.

    Attributes:
        question: The text after the haystack, up to the answer.
        answer: The answer, with a leading space if the text needs one.
        answers: All correct answers; empty if `answer` is the only one.
        required: The parts that an answer must contain, in any order; empty if `answers` contains the correct answers.
    """

    question: str
    answer: str
    answers: tuple[str, ...] = ()
    required: tuple[str, ...] = ()


@dataclass(frozen=True)
class Pieces:
    """The text of one retrieval question, before it is cut to a token length.

    Units are simply concatenated, so each piece includes its separators.

    Attributes:
        opening: The instruction before the haystack.
        haystack: Endless filler units: a sentence, a record, a document.
        needles: Units that must all be in the haystack. One goes at the given depth; the others are distractors at
            random depths.
        questions: One question about the first needle, or one about every needle in turn if any can be the target.
        padding: A unit of one token that is repeated before the question to reach the exact length, if filler units
            cannot be cut. Empty if filler may be cut anywhere.
        continuation: Endless text that continues the opening up to the exact length, if filler units cannot be cut and
            line ends do not belong between them; None otherwise.
        places: The depth of each needle, from 0 to 1, in rising order, if that is part of the question.
        bare_question: The question alone, if the text of the first question begins with something else.
        label: A heading before every unit and needle, with its `{number}` in the text. The units that fit are shuffled.
            It needs padding.
        is_rendered: Whether the opening and the questions include the text of the chat template.
        next_turn: The text that ends a generated answer, besides the model's end token; empty for none.
    """

    opening: str
    haystack: Iterator[str]
    needles: tuple[str, ...]
    questions: tuple[QuestionText, ...]
    padding: str = ""
    places: tuple[float, ...] = ()
    bare_question: str = ""
    label: str = ""
    continuation: Iterator[str] | None = None
    is_rendered: bool = False
    next_turn: str = ""

    def with_question_first(self) -> Self:
        """Return the question with its text before and after the haystack; only the first needle can be its target."""
        question = self.bare_question or split_question(self.questions[0].question)[0].strip()
        return dataclasses.replace(self, opening=f"{question}\n\n{self.opening}", questions=self.questions[:1])


@dataclass(frozen=True)
class Prompt:
    """One question at one depth.

    Attributes:
        ids: Token ids, the answer included.
        num_answer: The number of tokens of the answer, at the end of `ids`.
        answers: All correct answers, as text.
        required: The parts that an answer must contain, if it is a list.
        next_turn: The text that ends a generated answer, besides the model's end token; empty for none.
        question: The question alone or a further one, if the score needs it.
        messages: The conversation that `ids` render, in chat and for tasks that are conversations; empty for others.
        groups: The groups of questions that it belongs to, for separate results.
    """

    ids: list[int]
    num_answer: int
    answers: tuple[str, ...]
    required: tuple[str, ...] = ()
    next_turn: str = field(default="", kw_only=True)
    question: str = field(default="", kw_only=True)
    messages: tuple[Message, ...] = field(default=(), kw_only=True)
    groups: tuple[str, ...] = field(default=(), kw_only=True)


@dataclass(frozen=True)
class EncodedQuestion:
    """A question after the haystack with its answer, as tokens, and the correct answers as text."""

    tail: list[int]
    answer: list[int]
    answers: tuple[str, ...]
    required: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """The number of tokens of both."""
        return len(self.tail) + len(self.answer)


@dataclass(frozen=True)
class Parts:
    """The token ids of a question's pieces, without its haystack."""

    head: list[int]
    needles: list[list[int]]
    questions: list[EncodedQuestion]
    num_labels: int = 0
    """The number of tokens of the needles' headings."""

    @property
    def size(self) -> int:
        """The number of tokens of the longest question with an empty haystack."""
        needles = sum(map(len, self.needles)) + self.num_labels
        return len(self.head) + needles + max(ask.size for ask in self.questions)


def encode_parts(pieces: Pieces, encoder: Encoder, *, answer_room: int = 0) -> Parts:
    """Encode everything but the haystack, with at least `answer_room` tokens for a generated answer."""
    questions = []
    for question, text, answers, required in pieces.questions:
        if pieces.is_rendered:
            head, tail = encoder.encode_beginning(pieces.opening), encoder.encode_piece(question)
        else:
            head, tail = encoder.encode_frame(pieces.opening, question)
        answer = [*encoder.encode_piece(text)]
        if not answer:
            raise no_tokens(text)
        answer += answer[-1:] * (answer_room - len(answer))
        questions.append(EncodedQuestion(tail, answer, answers or (text,), required))
    num_labels = sum(len(_encode_label(pieces, encoder, number)) for number, _ in enumerate(pieces.needles, 1))
    return Parts(head, encoder.encode_pieces(pieces.needles), questions, num_labels)


def _encode_label(pieces: Pieces, encoder: Encoder, number: int) -> list[int]:
    return encoder.encode_piece(pieces.label.format(number=number)) if pieces.label else []


def lay_out(
    pieces: Pieces, parts: Parts, encoder: Encoder, length: int, depths: Sequence[float], rng: random.Random
) -> list[Prompt]:
    """Build prompts of exactly `length` tokens, one for each depth, with the same haystack.

    If any needle can be the target, one text serves several depths: it has a needle at each of them, each needle is
    the target of a separate prompt, and the others are its distractors. Depths are distributed over as few texts as
    possible, so that those of one text are far apart. Remaining needles go to random places.

    A needle goes to the boundary between two units that is nearest to its depth, in tokens of the haystack. Filler that
    cannot be cut is completed with padding before the question, or with a continuation of the opening.

    Args:
        pieces: The text of the question; its haystack is read as far as needed.
        parts: The tokens of the question.
        encoder: The tokenizer.
        length: The number of tokens of a prompt, answer included.
        depths: The depths of needles, from 0 (the beginning of the haystack) to 1 (its end).
        rng: Draws the places of the remaining needles.
    """
    room = length - parts.size
    if room < 0:
        raise too_short(length, parts.size)
    # Questions differ by a few tokens. All have the same haystack; more filler follows it before shorter questions.
    longest = max(ask.size for ask in parts.questions)
    units, rest = _fill(pieces, encoder, room, longest - min(ask.size for ask in parts.questions))
    anywhere = [rng.random() for _ in parts.needles]
    if pieces.label:
        rng.shuffle(units)
    labels = [_encode_label(pieces, encoder, number + 1) for number in range(len(units) + len(parts.needles))]
    num_texts = -(-len(depths) // len(parts.questions))
    prompts = []
    for number, _ in enumerate(depths):
        text, question = number % num_texts, number // num_texts
        places = pieces.places or [*depths[text::num_texts], *anywhere][: len(parts.needles)]
        haystack = _hide(units, parts.needles, places, labels)
        ask = parts.questions[question]
        extra = rest[: length - len(parts.head) - len(haystack) - ask.size]
        middle = [*haystack, *extra] if pieces.continuation is None else [*extra, *haystack]
        ids = [*parts.head, *middle, *ask.tail, *ask.answer]
        if len(ids) != length:
            raise AssertionError(f"a prompt has {len(ids)} tokens instead of {length}")
        messages = _list_messages(pieces, question, middle, encoder, ids[: -len(ask.answer)])
        prompts.append(
            Prompt(ids, len(ask.answer), ask.answers, ask.required, next_turn=pieces.next_turn, messages=messages)
        )
    return prompts


def _list_messages(
    pieces: Pieces, question: int, middle: Sequence[int], encoder: Encoder, ids: Sequence[int]
) -> tuple[Message, ...]:
    """Return the messages of a prompt, for servers that render them; none if it begins the answer.

    Args:
        pieces: The text of the question.
        question: The index of the question about it.
        middle: The tokens between the opening and the question.
        encoder: The tokenizer.
        ids: The tokens of the prompt.
    """
    if not (encoder.form.is_chat and encoder.uses_chat):
        return ()
    if pieces.is_rendered:
        return encoder.turn_layout.read_messages(encoder.tokenizer.decode(ids))
    text = f"{pieces.opening}{encoder.tokenizer.decode(middle)}{split_question(pieces.questions[question].question)[0]}"
    return ({"role": "user", "content": text},)


def make_message_prompt(
    encoder: Encoder, text: str, room: int, answers: tuple[str, ...], *, system: str = ""
) -> Prompt:
    """Return a prompt that is one message of the user, after a system message if there is a chat template.

    Args:
        encoder: The tokenizer.
        text: The message.
        room: Maximum number of generated tokens.
        answers: All correct answers.
        system: The system message; empty for none.
    """
    ids, turns = encoder.encode_message(text, system=system), [("system", system)] * bool(system) + [("user", text)]
    messages = tuple({"role": role, "content": content} for role, content in turns) if encoder.uses_chat else ()
    return Prompt([*ids, *ids[-1:] * room], room, answers, messages=messages)


def too_short(length: int, minimum: int, task: str = "The question") -> CtxextError:
    """Return the error for a length that is too short for the question."""
    return CtxextError(
        f"{task} needs at least {minimum} tokens, but a prompt length is {length}.",
        hint=f"Use --lengths {minimum} or more.",
    )


def _hide(
    units: Sequence[list[int]],
    needles: Sequence[list[int]],
    depths: Sequence[float],
    labels: Sequence[list[int]] = (),
) -> list[int]:
    """Return the tokens of the units, with each needle at the boundary between units that is nearest to its depth.

    The labels precede units and needles, in order; none by default.
    """
    ends = [0, *accumulate(map(len, units))]
    places = [min(range(len(ends)), key=lambda place: abs(ends[place] - depth * ends[-1])) for depth in depths]
    in_order: list[list[int]] = []
    for place in range(len(ends)):
        in_order += (needle for needle, at in zip(needles, places, strict=True) if at == place)
        in_order += units[place : place + 1]
    return [
        *chain.from_iterable(chain(label, unit) for label, unit in zip(labels or repeat([]), in_order, strict=False))
    ]


def _fill(pieces: Pieces, encoder: Encoder, room: int, more: int) -> tuple[list[list[int]], list[int]]:
    """Return units that fill `room` tokens, the last one cut if possible, and the tokens that may follow them.

    The following tokens are the rest of the filler, at least `more` of them, or padding or a continuation if units
    cannot be cut.
    """
    units: list[list[int]] = []
    haystack = iter(pieces.haystack)
    used = 0
    while used < room + more:
        texts = list(islice(haystack, _BLOCK if pieces.continuation is None else _BLOCK_OF_PAGES))
        block = encoder.encode_pieces(texts)
        if not any(block):
            raise CtxextError("The haystack is empty or too short for this length.", hint="Use a longer text.")
        units += block
        used += sum(map(len, block))
    first = len(pieces.needles) + 1  # The headings of the needles are counted with them.
    ends = list(
        accumulate(len(unit) + len(_encode_label(pieces, encoder, number)) for number, unit in enumerate(units, first))
    )
    whole = sum(end <= room for end in ends)
    taken = ends[whole - 1] if whole else 0
    if pieces.padding:
        if not encoder.encode_piece(pieces.padding):
            raise no_tokens(pieces.padding)
        return units[:whole], encoder.encode_piece(pieces.padding)[-1:] * (room - taken + more)
    if pieces.continuation is not None:
        return units[:whole], _encode_up_to(pieces.continuation, encoder, room - taken + more)
    following = list(chain.from_iterable(units[whole:]))
    if room > taken:
        return [*units[:whole], following[: room - taken]], following[room - taken :]
    return units[:whole], following


def _encode_up_to(texts: Iterator[str], encoder: Encoder, size: int) -> list[int]:
    """Return exactly `size` tokens of endless texts; the last text is cut."""
    ids = list[int]()
    while len(ids) < size:
        ids += encoder.encode_piece("".join(islice(texts, _BLOCK)))
    return ids[:size]
