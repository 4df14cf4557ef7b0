"""Variable tracking: chains of assignments through a long text."""

import random
import string
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from ctxext.data.prompt import Pieces
from ctxext.data.prose import endless, random_number
from ctxext.evaluate.tasks.base import RetrievalTask

OPENING = "Some values are set and copied in the following text. Keep track of which name stands for which value.\n"
_NUM_LETTERS, _NUM_DIGITS = 4, 5


@dataclass(frozen=True)
class Variables(RetrievalTask):
    """Follow a value from name to name.

    Attributes:
        num_copies: How often the value is copied.
        num_chains: The number of such chains in the text; the question is about one.
        text: Prose to hide them in, as sentences; empty for the prose of the package.
    """

    name: ClassVar[str] = "variables"
    description: ClassVar[str] = (
        "A value is given to a name and copied from name to name through the text; right is the share of its names."
    )
    shows: ClassVar[str] = "following a value from name to name"
    is_written: ClassVar[bool] = True
    answer_room: ClassVar[int] = 64
    has_depths: ClassVar[bool] = False
    num_copies: int = 3
    num_chains: int = 2
    text: tuple[str, ...] = ()

    def pieces(self, rng: random.Random) -> Pieces:
        """The text of one question."""
        length = self.num_copies + 1
        names = variable_names(rng, length * self.num_chains, _NUM_LETTERS)
        chains = [names[at : at + length] for at in range(0, len(names), length)]
        values = [random_number(rng, _NUM_DIGITS) for _ in chains]
        while len(set(values)) < len(values):
            values = [random_number(rng, _NUM_DIGITS) for _ in chains]
        placed = []
        for chain, value in zip(chains, values, strict=True):
            lines = [f" Let {chain[0]} be {value}."]
            lines += [f" Let {new} be what {old} is." for old, new in pairwise(chain)]
            placed += list(zip(sorted(rng.random() for _ in lines), lines, strict=True))
        placed.sort(key=lambda pair: pair[0])
        wanted = chains[0]
        return Pieces(
            opening=OPENING,
            haystack=endless(self.text, random.Random(rng.getrandbits(64))),
            needles=tuple(line for _, line in placed),
            question=f"\nWhich {length} names stand for {values[0]} in the end? The names are",
            answer=f" {', '.join(wanted)}.",
            wanted=tuple(wanted),
            places=tuple(place for place, _ in placed),
        )


def variable_names(
    rng: random.Random, count: int, num_letters: int, letters: str = string.ascii_uppercase
) -> list[str]:
    """Different words of random letters."""
    names: dict[str, None] = {}
    while len(names) < count:
        names["".join(rng.choices(letters, k=num_letters))] = None
    return list(names)
