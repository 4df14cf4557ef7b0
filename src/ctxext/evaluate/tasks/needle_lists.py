"""Harder needles: a haystack of needles, several values of one key, several questions at once."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from ctxext.data import prose
from ctxext.data.prompt import Asked, Pieces
from ctxext.data.prose import endless
from ctxext.evaluate.tasks.base import RetrievalTask

OPENING = (
    "Numbers are written down in the following text. Keep them in mind; you will be asked about them at the end.\n"
)
_FACT = " The locker of {key} opens with {value}."
_NUM_DIGITS = 6


def _numbers(rng: random.Random, count: int) -> list[str]:
    return list(map(str, rng.sample(range(10 ** (_NUM_DIGITS - 1), 10**_NUM_DIGITS), count)))


def _fact(key: str, value: str) -> str:
    return _FACT.format(key=key, value=value)


@dataclass(frozen=True)
class NeedleLines(RetrievalTask):
    """Find one sentence where the whole text is made of sentences of the same form.

    Attributes:
        num_needles: The number of sentences that can be asked for; the question is about the first.
    """

    name: ClassVar[str] = "needle-lines"
    description: ClassVar[str] = "Every sentence of the text tells whose locker opens with which number; one is asked."
    shows: ClassVar[str] = "telling one sentence from many of the same form"
    num_needles: int = 4

    def pieces(self, rng: random.Random) -> Pieces:
        """The text of one question."""
        keys = _people(random.Random(rng.getrandbits(64)))
        asked = [next(keys) for _ in range(self.num_needles)]
        values = _numbers(rng, self.num_needles)
        numbers = random.Random(rng.getrandbits(64))
        asks = tuple(
            Asked(f"\nWhat does the locker of {key} open with? It opens with", f" {value}")
            for key, value in zip(asked, values, strict=True)
        )
        return Pieces(
            opening=OPENING,
            haystack=(_fact(key, prose.random_number(numbers, _NUM_DIGITS)) for key in keys),
            needles=tuple(map(_fact, asked, values)),
            question=asks[0][0],
            answer=asks[0][1],
            asks=asks,
        )


@dataclass(frozen=True)
class NeedleValues(RetrievalTask):
    """Find every number of one thing, in different places of the text.

    Attributes:
        num_values: The number of numbers.
        text: Prose to hide them in, as sentences; empty for the prose of the package.
    """

    name: ClassVar[str] = "needle-values"
    description: ClassVar[str] = "One key has several numbers, each told somewhere; right is the share that is written."
    shows: ClassVar[str] = "finding everything that a long text tells of one thing"
    is_written: ClassVar[bool] = True
    answer_room: ClassVar[int] = 64
    has_depths: ClassVar[bool] = False
    num_values: int = 4
    text: tuple[str, ...] = ()

    def pieces(self, rng: random.Random) -> Pieces:
        """The text of one question."""
        key, other = (f"{adjective} {noun}" for adjective, noun in _things(rng, 2))
        values = _numbers(rng, self.num_values + 1)
        wanted = values[:-1]
        fact = " One of the numbers of the {key} is {value}."
        return Pieces(
            opening=OPENING,
            haystack=endless(self.text, random.Random(rng.getrandbits(64))),
            needles=(
                *(fact.format(key=key, value=value) for value in wanted),
                fact.format(key=other, value=values[-1]),
            ),
            question=f"\nWhich are all the {len(wanted)} numbers of the {key}? The numbers of the {key} are",
            answer=f" {', '.join(wanted)}.",
            wanted=tuple(wanted),
        )


@dataclass(frozen=True)
class NeedleQuestions(RetrievalTask):
    """Answer several questions at once.

    Attributes:
        num_questions: The number of questions.
        num_others: Facts of the same form that are not asked for.
        text: Prose to hide them in, as sentences; empty for the prose of the package.
    """

    name: ClassVar[str] = "needle-questions"
    description: ClassVar[str] = "Several keys are asked for at once; right is the share of numbers that is written."
    shows: ClassVar[str] = "answering several questions over one long text"
    is_written: ClassVar[bool] = True
    answer_room: ClassVar[int] = 96
    has_depths: ClassVar[bool] = False
    num_questions: int = 4
    num_others: int = 4
    text: tuple[str, ...] = ()

    def pieces(self, rng: random.Random) -> Pieces:
        """The text of one question."""
        people = _people(random.Random(rng.getrandbits(64)))
        keys = [next(people) for _ in range(self.num_questions + self.num_others)]
        values = _numbers(rng, len(keys))
        asked = keys[: self.num_questions]
        listed = f"{', '.join(asked[:-1])} and {asked[-1]}" if len(asked) > 1 else asked[0]
        wanted = values[: self.num_questions]
        return Pieces(
            opening=OPENING,
            haystack=endless(self.text, random.Random(rng.getrandbits(64))),
            needles=tuple(map(_fact, keys, values)),
            question=f"\nWhat do the lockers of {listed} open with? In this order, they open with",
            answer=f" {', '.join(wanted)}.",
            wanted=tuple(wanted),
        )


def _things(rng: random.Random, count: int) -> list[tuple[str, str]]:
    return [(rng.choice(prose.ADJECTIVES), noun) for noun in rng.sample(prose.OBJECTS, count)]


def _people(rng: random.Random) -> Iterator[str]:
    """An endless stream of different names of people."""
    return prose.different_names(rng, prose.person_name, len(prose.FIRST_NAMES) * len(prose.LAST_NAMES))
