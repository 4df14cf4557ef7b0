"""Needle retrieval: sentences with a number, hidden in prose."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Self

from ctxext.data import prose
from ctxext.data.prompt import Asked, Pieces
from ctxext.data.prose import endless, random_number
from ctxext.evaluate.tasks.base import RetrievalTask, TaskOptions

OPENING = (
    "Some special magic numbers are hidden in the following text. Memorize them. "
    "You will be asked about them afterwards.\n"
)


@dataclass(frozen=True)
class Phrasing:
    """The wording of a fact and its question, with `{key}` for the thing and `{value}` for its number."""

    fact: str
    question: str


PHRASINGS: dict[str, Phrasing] = {
    "magic": Phrasing(
        "The special magic number for {key} is: {value}.",
        "What is the special magic number for {key}? The special magic number for {key} is:",
    ),
    "code": Phrasing(
        "The code written on the {key} is {value}.",
        "Which code is written on the {key}? The code written on the {key} is",
    ),
    "opens": Phrasing(
        "Remember that the {key} is opened with {value}.",
        "What is the {key} opened with? The {key} is opened with",
    ),
    "number": Phrasing("The number of the {key} is {value}.", "What is the number of the {key}? The answer is"),
}


@dataclass(frozen=True)
class Needle(RetrievalTask):
    """Find one sentence in prose among others of the same form.

    Attributes:
        num_needles: The number of facts in the text; the question is about the first, the others are distractors.
        phrasing: A key of `PHRASINGS`, or "any" for a random one per question.
        num_digits: The number of digits of each number.
        text: Sentences to hide the facts in, joined by spaces; empty for the prose of the package.
        filler: "prose", or "same" for sentences in the form of the facts, which large models of 2026 find hard
            (https://arxiv.org/abs/2605.23170).
    """

    name: ClassVar[str] = "needle"
    description: ClassVar[str] = (
        "A sentence that tells a number stands in a long text; the number is asked for at the end."
    )
    shows: ClassVar[str] = "finding a sentence in a long text"
    num_needles: int = 4
    phrasing: str = "magic"
    num_digits: int = 5
    text: tuple[str, ...] = ()
    filler: Literal["prose", "same"] = "prose"

    @classmethod
    def from_options(cls, options: TaskOptions) -> Self:
        """The task with the user's number of needles, text and filler."""
        filler: Literal["prose", "same"] = "same" if options.filler == "same" else "prose"
        return cls(num_needles=options.num_needles, text=options.text, filler=filler)

    def pieces(self, rng: random.Random) -> Pieces:
        """The text of one question."""
        phrasing = PHRASINGS[rng.choice(list(PHRASINGS)) if self.phrasing == "any" else self.phrasing]
        keys = prose.object_names(rng, self.num_needles)
        values = [random_number(rng, self.num_digits) for _ in keys]
        return Pieces(
            opening=OPENING,
            haystack=self._haystack(phrasing, keys, random.Random(rng.getrandbits(64))),
            needles=tuple(
                " " + phrasing.fact.format(key=key, value=value) for key, value in zip(keys, values, strict=True)
            ),
            question="\n" + phrasing.question.format(key=keys[0]),
            answer=f" {values[0]}",
            asks=tuple(
                Asked("\n" + phrasing.question.format(key=key), f" {value}")
                for key, value in zip(keys, values, strict=True)
            ),
        )

    def _haystack(self, phrasing: Phrasing, asked: Sequence[str], rng: random.Random) -> Iterator[str]:
        if self.filler == "prose":
            yield from endless(self.text, rng)
        for key in prose.different_names(rng, prose.object_name, len(prose.ADJECTIVES) * len(prose.OBJECTS)):
            if not key.startswith(tuple(asked)):
                yield " " + phrasing.fact.format(key=key, value=random_number(rng, self.num_digits))
