"""The text that needles are hidden in: the prose of the package, or a user's text."""

import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from ctxext.data import prose
from ctxext.errors import CtxextError
from ctxext.reading.strict import read_text

_SENTENCE_END = re.compile(r"(?<=[.!?。！？])\s+|\n\s*\n")


def sentences_of(text: str) -> tuple[str, ...]:
    """Split a text at the ends of sentences and paragraphs, and normalize white space."""
    return tuple(" ".join(unit.split()) for unit in _SENTENCE_END.split(text) if unit.strip())


def read_haystack(path: Path) -> tuple[str, ...]:
    """Read a text file as sentences, to be joined by spaces.

    Raises:
        CtxextError: The file cannot be read or holds no text.
    """
    units = sentences_of(read_text(path))
    if not units:
        raise CtxextError(f'The haystack "{path}" is empty.', hint="Give a text file with some pages of prose.")
    return units


def endless(text: Sequence[str], rng: random.Random) -> Iterator[str]:
    """An endless stream of sentences with a leading space: of a text, from a random place on, or of the package.

    Args:
        text: Sentences; empty for the prose of the package.
        rng: Draws the prose, or the place to begin.
    """
    if not text:
        yield from (" " + sentence for sentence in prose.sentences(rng))
    start = rng.randrange(len(text))
    while True:
        yield from (" " + unit for unit in text[start:])
        start = 0
