"""The text around needles: endless prose from a small grammar, or a user's text.

Sentences are drawn from the patterns and word lists of prose.txt, so the text is free to use, needs no download, is the
same for the same seed, and contains no digits: a number in a haystack is always a needle.
"""

import random
import re
import uuid
from collections.abc import Callable, Iterator, Sequence
from importlib import resources
from pathlib import Path

from ctxext.errors import CtxextError
from ctxext.files.strict import read_text


def _read_lists() -> dict[str, list[str]]:
    """Read the lists of prose.txt by name: words, or phrases that are separated by "|"."""
    lists = {}
    for block in resources.files("ctxext.data").joinpath("prose.txt").read_text(encoding="utf-8").split("\n\n"):
        name, _, text = block.partition(":")
        lists[name] = split_list(text)
    return lists


def split_list(text: str) -> list[str]:
    """Split a list of words, or of phrases that are separated by "|"."""
    return [" ".join(part.split()) for part in text.split("|")] if "|" in text else text.split()


WORDS = _read_lists()
"""Words and phrases by slot name."""

PATTERNS = WORDS.pop("pattern")
FIRST_NAMES, LAST_NAMES, PLACES = WORDS["first"], WORDS["last"], WORDS["place"]
ADJECTIVES, OBJECTS, TRADES, GOODS, SITES = (WORDS[name] for name in ("adjective", "object", "trade", "goods", "site"))
_ARTICLE = re.compile(r"\b([Aa]) (?=[aeiou])")
_SLOT = re.compile(r"\{(\w+)\}")
_SENTENCE_END = re.compile(r"(?<=[.!?。！？])\s+|\n\s*\n")


def sentence(rng: random.Random) -> str:
    """Return a random sentence, without surrounding spaces."""
    pattern = rng.choice(PATTERNS)
    filled = _SLOT.sub(lambda slot: rng.choice(WORDS[slot[1]]), pattern)
    return _ARTICLE.sub(r"\1n ", filled)


def sentences(rng: random.Random) -> Iterator[str]:
    """Yield endless sentences, without surrounding spaces; the same for the same state of `rng`."""
    while True:
        yield sentence(rng)


def object_name(rng: random.Random) -> str:
    """Return the name of a thing, in two words, such as "amber lantern"."""
    return f"{rng.choice(ADJECTIVES)} {rng.choice(OBJECTS)}"


def object_names(rng: random.Random, count: int) -> list[str]:
    """Return names of different things; no noun is repeated if there are enough nouns.

    Raises:
        ValueError: There are not that many different names.
    """
    if count <= len(OBJECTS):
        return [f"{rng.choice(ADJECTIVES)} {noun}" for noun in rng.sample(OBJECTS, count)]
    return rng.sample([f"{adjective} {noun}" for adjective in ADJECTIVES for noun in OBJECTS], count)


def different_names(rng: random.Random, draw: Callable[[random.Random], str], count: int) -> Iterator[str]:
    """Yield endless different names, drawn from `count` names; places are added after half of them are used."""
    used: set[str] = set()
    parts = 1
    while True:
        if len(used) * 2 >= count * len(PLACES) ** (parts - 1):
            parts += 1
        name = " of ".join([draw(rng), *(rng.choice(PLACES) for _ in range(parts - 1))])
        if name not in used:
            used.add(name)
            yield name


def person_name(rng: random.Random) -> str:
    """Return a first and a last name."""
    return f"{rng.choice(FIRST_NAMES)} {rng.choice(LAST_NAMES)}"


def random_number(rng: random.Random, num_digits: int) -> str:
    """Return a number of `num_digits` digits that does not begin with zero."""
    return str(rng.randrange(10 ** (num_digits - 1), 10**num_digits))


def random_uuid(rng: random.Random) -> str:
    """Return a version 4 UUID."""
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def sentences_of(text: str) -> tuple[str, ...]:
    """Split a text at the ends of sentences and paragraphs, and normalize white space."""
    return tuple(" ".join(unit.split()) for unit in _SENTENCE_END.split(text) if unit.strip())


def read_haystack(path: Path) -> tuple[str, ...]:
    """Read a text file as sentences, to be joined by spaces."""
    units = split_sentences(read_text(path), path)
    if not units:
        raise CtxextError(f'The haystack "{path}" is empty.', hint="Use a text file with some pages of prose.")
    return units


_LONGEST = 1 << 18
"""Maximum number of characters of a sentence, which the tokenizer reads at once."""


def split_sentences(text: str, path: Path) -> tuple[str, ...]:
    """Split the text of a file at the ends of sentences and paragraphs; raise if a sentence is too long to tokenize."""
    units = sentences_of(text.removeprefix("\ufeff"))
    if (longest := max(map(len, units), default=0)) > _LONGEST:
        raise CtxextError(
            f'"{path}" has a sentence of {longest} characters.', hint="Use prose with full stops or lines."
        )
    return units


def stream_sentences(text: Sequence[str], rng: random.Random) -> Iterator[str]:
    """Yield endless sentences with a leading space: of a text, from a random place on, or of the package.

    Args:
        text: Sentences; empty for the prose of the package.
        rng: Draws the prose, or the place to begin.
    """
    if not text:
        yield from (" " + sentence for sentence in sentences(rng))
    start = rng.randrange(len(text))
    while True:
        yield from (" " + unit for unit in text[start:])
        start = 0
