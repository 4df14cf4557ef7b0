"""What a retrieval task is: a question whose answer stands somewhere in a long text."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol


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
    """

    opening: str
    haystack: Iterator[str]
    needles: tuple[str, ...]
    question: str
    answer: str
    padding: str = ""
    answers: tuple[str, ...] = ()
    asks: tuple[tuple[str, str], ...] = ()


class Task(Protocol):
    """A kind of question. Implementations are frozen dataclasses whose fields are the task's settings."""

    @property
    def name(self) -> str:
        """The name on the command line and in reports."""
        ...

    def pieces(self, rng: random.Random) -> Pieces:
        """The text of one question; the same for the same state of `rng`."""
        ...


def random_number(rng: random.Random, num_digits: int) -> str:
    """A number of that many digits that does not begin with zero."""
    return str(rng.randrange(10 ** (num_digits - 1), 10**num_digits))
