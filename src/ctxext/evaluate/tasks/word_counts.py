"""Counting over a whole text: the most common words of a list, and the most frequent of made-up words."""

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from ctxext.data import prose
from ctxext.data.prompt import Pieces
from ctxext.evaluate.tasks.base import RetrievalTask

_SYLLABLES = re.findall("..", "badofigahujokelimonuperasitovuwaxezo")
_WORDS = (*prose.OBJECTS, *prose.GOODS, *prose.SITES, *prose.TRADES)


class _WordCounts(RetrievalTask):
    """A stream of words in blocks, each with `counts` of the wanted words and rare words at most once."""

    is_written: ClassVar[bool] = True
    answer_room: ClassVar[int] = 64
    has_depths: ClassVar[bool] = False
    counts: tuple[int, ...]
    num_rare: int

    def _blocks(self, wanted: Sequence[str], rare: Sequence[str], rng: random.Random) -> Iterator[str]:
        while True:
            block = [word for word, count in zip(wanted, self.counts, strict=True) for _ in range(count)]
            block += rng.sample(rare, self.num_rare)
            rng.shuffle(block)
            yield from (f" {word}" for word in block)

    def _pieces(self, words: Sequence[str], opening: str, ask: str, rng: random.Random) -> Pieces:
        wanted, rare = words[: len(self.counts)], words[len(self.counts) :]
        return Pieces(
            opening=opening,
            haystack=self._blocks(wanted, rare, random.Random(rng.getrandbits(64))),
            needles=(),
            question=ask,
            answer=f" {', '.join(wanted)}.",
            wanted=tuple(wanted),
        )


@dataclass(frozen=True)
class CommonWords(_WordCounts):
    """Name the words of a list that come most often.

    Attributes:
        counts: How often each wanted word comes in a block of the list.
        num_rare: Other words of a block, from some hundred and fifty words that are equally frequent.
    """

    name: ClassVar[str] = "common-words"
    description: ClassVar[str] = (
        "A list of words in which five come about ten times as often as any other; right is the share of them."
    )
    shows: ClassVar[str] = "summing up a whole text"
    counts: tuple[int, ...] = (1, 1, 1, 1, 1)
    num_rare: int = 12

    def pieces(self, rng: random.Random) -> Pieces:
        """The text of one question."""
        words = list(dict.fromkeys(_WORDS))
        rng.shuffle(words)
        opening = "Here is a long list of words, in which some words come again and again:\n"
        ask = f"\nWhich {len(self.counts)} words come most often in the list? The most common words are"
        return self._pieces(words, opening, ask, rng)


@dataclass(frozen=True)
class CodedWords(_WordCounts):
    """Name the three most frequent words of a text in an unknown code.

    Attributes:
        counts: How often each wanted word comes in a block of the text.
        num_rare: Other words of a block.
        num_others: How many other words the code has.
    """

    name: ClassVar[str] = "coded-words"
    description: ClassVar[str] = "A text of made-up words; right is the share of the three most frequent that is named."
    shows: ClassVar[str] = "counting over a whole text"
    counts: tuple[int, ...] = (6, 4, 3)
    num_rare: int = 7
    num_others: int = 40

    def pieces(self, rng: random.Random) -> Pieces:
        """The text of one question."""
        words = _coded_words(rng, len(self.counts) + self.num_others)
        opening = "The following text is written in a code that nobody knows:\n"
        ask = f"\nWhich {len(self.counts)} words of the code come most often? The most frequent words are"
        return self._pieces(words, opening, ask, rng)


def _coded_words(rng: random.Random, count: int) -> list[str]:
    words: dict[str, None] = {}
    while len(words) < count:
        words["".join(rng.choices(_SYLLABLES, k=3))] = None
    return list(words)
