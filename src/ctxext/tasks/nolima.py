"""NoLiMa, https://arxiv.org/abs/2502.05167: a needle that shares no word with its question, in shuffled books."""

import functools
import random
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Self

from ctxext.data.encoding import Encoder
from ctxext.data.prompt import Pieces, Prompt, make_message_prompt
from ctxext.errors import CtxextError
from ctxext.files.strict import read_text
from ctxext.tasks.published import PublishedTask

if TYPE_CHECKING:
    from ctxext.tasks.entries import NeedleArguments, NeedleSet

TEMPLATE = (
    "You will answer a question based on the following book snippet:\n\n{haystack}\n\nUse the information provided in "
    "the book snippet to answer the question. Your answer should be short and based on either explicitly stated facts "
    "or strong, logical inferences.\n\nQuestion: {question}\n\n Return only the final answer with no additional "
    "explanation or reasoning."
)
"""The prompt of needle sets without `task_template` (appendix C; evaluation/run_tests.py)."""

SYSTEM = "You are a helpful assistant"
"""The system message of every prompt (evaluation/async_api_connector.py)."""

_SEED, _SEEDS = 42, 1 << 32
_CHARACTER = "{CHAR}"
_MARGIN = 16
"""More tokens than may be added where the needle divides the text."""


@dataclass(frozen=True)
class NeedleTest:
    """One needle with one question about it.

    Attributes:
        needle: The sentence to hide; it may contain `{CHAR}`.
        question: The question.
        answers: The correct answers if the needle has no character.
        characters: Names to draw the character from.
        template: The prompt, with `{haystack}` and `{question}`.
        seed: The seed of the characters for the first book.
    """

    needle: str
    question: str
    answers: tuple[str, ...]
    characters: tuple[str, ...]
    template: str
    seed: int


@dataclass(frozen=True, kw_only=True)
class NeedlePieces(Pieces):
    """A test and the number of its book, instead of the pieces of a text."""

    test: NeedleTest
    book: int


@dataclass(frozen=True, kw_only=True)
class NoLiMa(PublishedTask):
    """Name the character of a needle, which the question describes in other words.

    As in evaluation/ and data/book_haystack.py of https://github.com/adobe-research/NoLiMa: the haystack alone has
    `length` tokens, the needle follows the first line end after its depth, and an answer that contains the name is
    correct.

    Attributes:
        needles: The file of the needle set, without suffix.
        nolima: The folder with needle sets and books.
        seed: Added to the authors' seed.
    """

    download: ClassVar[str] = "hf download amodaresi/NoLiMa --repo-type dataset --local-dir DIR"

    scored: str = "The answer contains the name"
    shows: str = "finding a fact that shares no word with its question in books"
    options: tuple[str, ...] = ("nolima",)
    answer_room: int = 192
    has_one_form: bool = True
    base_length: int = 1024
    needles: str = "needle_set"
    nolima: Path | None = None
    seed: int = 0

    def fit_to_length(self, encoder: Encoder, length: int) -> Self:
        """Return the task with the length of its haystack."""
        return replace(self, length=length)

    @property
    def _tests(self) -> tuple["_Question", ...]:
        return _read_tests(self.find(f"{self.needles}.json")[0])

    @property
    def _books(self) -> list[Path]:
        return self.find("rand_shuffle/*.txt")

    def number_text(self, sample: int) -> int:
        """Return the index of the question; the base score uses the best score of each question."""
        return sample % len(self._tests)

    def draw(self, rng: random.Random, sample: int) -> Pieces:
        """Return a test and its book: all tests in a seeded order with the first book, then with the next."""
        tests, num_books = self._tests, len(self._books)
        if sample >= len(tests) * num_books:
            message = f'"{self.find_folder()}" contains {len(tests)} questions and {num_books} books for "{self.name}".'
            raise CtxextError(message, hint=f"Use --samples {len(tests) * num_books} or fewer.")
        order = random.Random(self.seed).sample(range(len(tests)), len(tests))
        test = _make_test(*tests[order[self.number_text(sample)]])
        return NeedlePieces("", iter(()), (test.needle,), (), test=test, book=sample // len(tests))

    def pieces(self, rng: random.Random) -> Pieces:
        """Return the first test."""
        return self.draw(rng, 0)

    def size(self, pieces: Pieces, encoder: Encoder) -> int:
        """Return an upper limit of the number of tokens of a prompt and its answer."""
        assert isinstance(pieces, NeedlePieces)
        test = pieces.test
        names = max(test.characters, key=len, default="")
        frame = test.template.format(haystack=test.needle, question=test.question).replace(_CHARACTER, names)
        return self.length + len(encoder.encode_message(frame, system=SYSTEM)) + self.answer_room + _MARGIN

    def prompts(
        self, pieces: Pieces, encoder: Encoder, length: int, depths: Sequence[float], rng: random.Random
    ) -> list[Prompt]:
        """Build one prompt for each depth; the characters are those of the authors' seeds."""
        assert isinstance(pieces, NeedlePieces)
        import numpy

        test, draws = (
            pieces.test,
            numpy.random.RandomState((_SEED + self.seed + pieces.test.seed + pieces.book) % _SEEDS),
        )
        prompts = []
        for depth in depths:
            name = str(draws.choice(test.characters)) if _CHARACTER in test.needle else ""
            text = hide(encoder, self._books[pieces.book], test.needle.replace(_CHARACTER, name), self.length, depth)
            filled = test.template.format(haystack=text, question=test.question.replace(_CHARACTER, name))
            answers = (name,) if name else test.answers
            prompts.append(make_message_prompt(encoder, filled, self.answer_room, answers, system=SYSTEM))
        return prompts

    def grade(self, text: str, prompt: Prompt) -> float:
        """Return 1 if the text contains a correct answer, in the same case, else 0."""
        return float(any(answer in text for answer in prompt.answers))


def hide(encoder: Encoder, book: Path, needle: str, length: int, depth: float) -> str:
    """Return `length` tokens of a book as text, with a needle after the first line end at or after a depth.

    Args:
        encoder: The tokenizer.
        book: The text file.
        needle: The sentence to hide.
        length: The number of tokens of the text without the needle.
        depth: The depth of the needle, from 0 to 1.
    """
    ids, ends = _encode_book(encoder, book)
    at = bisect_left(ends, depth, key=lambda end: end / (length + 1))
    begin = ends[at] - round(length * depth) if at < len(ends) else len(ids)
    if begin + length > len(ids):
        raise CtxextError(f'"{book}" has only {len(ids)} tokens.', hint="Use shorter --lengths.")
    before = encoder.tokenizer.decode(ids[begin : ends[at] + 1])
    after = encoder.tokenizer.decode(ids[ends[at] + 1 : begin + length])
    return f"{before[: max(before.rfind(chr(10)), 0)]} {needle}\n{after}"


@functools.lru_cache(maxsize=8)
def _encode_book(encoder: Encoder, book: Path) -> tuple[list[int], list[int]]:
    """Return the tokens of a book, and the places of those with a line end, 0 included."""
    ids = encoder.encode_document(read_text(book))[len(encoder.get_start_tokens()) :]
    breaks = {token for token in set(ids) if "\n" in encoder.tokenizer.decode([token])}
    return ids, [0, *(place for place, token in enumerate(ids) if token in breaks)]


_Question = tuple["NeedleSet", str, "NeedleArguments"]
"""A needle with one of its questions and one of its tests."""


@functools.lru_cache(maxsize=8)
def _read_tests(file: Path) -> tuple[_Question, ...]:
    """Read a needle set: every question of every needle with every set of arguments (evaluation/run_tests.py)."""
    from ctxext.tasks.entries import NEEDLE_SETS, check_entry, read_json

    sets = check_entry(read_json(file), NEEDLE_SETS, f'"{file}"', f"Use a needle set of NoLiMa: {NoLiMa.download}")
    for needles in sets:
        name = f'"{file}": the needle "{needles["id"]}"'
        if needles.get("distractors") is not None:
            raise CtxextError(f"{name} has distractors, which are unsupported.", hint="Use another needle set.")
        is_named = _CHARACTER in needles["needle"]
        lacks_answer = any(not test.get("gold_answers") for test in needles["tests"].values())
        if not needles.get("character_set") if is_named else lacks_answer:
            field = "character_set" if is_named else "gold_answers"
            raise CtxextError(f'{name} has no answer: "{field}" is missing.', hint=NoLiMa.download)
    return tuple(
        (needles, question, test)
        for needles in sets
        for question in needles["questions"].values()
        for test in needles["tests"].values()
    )


def _make_test(needles: "NeedleSet", question: str, test: "NeedleArguments") -> NeedleTest:
    needle, filled = needles["needle"], question
    for number, argument in enumerate(test["input_args"], start=1):
        mark = f"{{{number}}}"
        needle = needle.replace(mark, argument)
        # As in the authors' code, only the last argument in a question is filled in.
        filled = question.replace(mark, argument) if mark in question else filled
    answers, characters = test.get("gold_answers") or (), needles.get("character_set") or ()
    template, seed = needles.get("task_template") or TEMPLATE, int(needles["id"][:4])
    return NeedleTest(needle, filled, tuple(answers), tuple(characters), template, seed)


_DESCRIPTION = (
    "The authors' needles in their books: the answer is the name in a needle that shares no word with the question. "
    "The length is that of the book's text. The effective length is the longest with 85 % of the base score, the mean "
    "of each question's best score at up to 1k tokens."
)
NOLIMA = (
    NoLiMa(name="nolima", description=_DESCRIPTION),
    NoLiMa(name="nolima-hard", description=f"NoLiMa-Hard. {_DESCRIPTION}", needles="needle_set_hard"),
)
"""The task with all needles, and with the ten hardest pairs of needle and question."""
