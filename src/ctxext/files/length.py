"""Parse lengths in tokens (32768, 32k, 128K, 1M) and lists with commas."""

import re
from collections.abc import Sequence
from typing import Any

from ctxext.errors import CtxextError
from ctxext.options import options_of

LONGEST = 10**10
"""Upper limit of a context length in tokens."""

_UNITS = {"": 1, "k": 1024, "m": 1024 * 1024}


LENGTH = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kKmM]?)\s*")


def looks_like_length(text: str) -> bool:
    """Return whether a text has the form of a number of tokens."""
    return LENGTH.fullmatch(text) is not None


def parse_length(text: str) -> int:
    """Parse a number of tokens; k is 1024 and M is 1024 k."""
    match = LENGTH.fullmatch(text)
    value = float(match[1]) * _UNITS[match[2].lower()] if match else 0.0
    check_length(value)
    if value < 1 or value != int(value):
        raise CtxextError(f'"{text}" is not a length in tokens.', hint="Use for example 32768, 32k, 128K or 1M.")
    return int(value)


def as_length(value: int | str) -> int:
    """Return a length as a number of tokens, parsed if it is text."""
    return parse_length(value) if isinstance(value, str) else value


def read_words(options: Any) -> None:
    """Parse the text values of an options object during construction.

    A length may be text. Several lengths may be a list, a single length, or text with commas, which is sorted without
    duplicates. Names may be text with commas, or several such texts.
    """
    for name, option in options_of(type(options)).items():
        value = getattr(options, name)
        if option.kind == "length" and value is not None:
            object.__setattr__(options, name, as_length(value))
        elif option.kind == "lengths" and isinstance(value, str):
            object.__setattr__(options, name, tuple(sorted(set(map(parse_length, names_in(value))))))
        elif option.kind == "lengths":
            values = [value] if isinstance(value, int) else value
            object.__setattr__(options, name, tuple(map(as_length, values)))
        elif option.kind == "names" and isinstance(value, str | list | tuple):
            object.__setattr__(options, name, names_in(value))


def names_in(words: str | Sequence[str]) -> tuple[str, ...]:
    """Return the names in a text with commas or in several such texts, without duplicates."""
    texts = [words] if isinstance(words, str) else words
    return tuple(dict.fromkeys(name.strip() for text in texts for name in text.split(",") if name.strip()))


def check_length(tokens: float) -> None:
    """Raise if a length is above the upper limit."""
    if tokens > LONGEST:
        raise CtxextError(f"{tokens:.3g} tokens are above the limit.", hint=f"Use at most {LONGEST}.")


def format_length(tokens: int) -> str:
    """Format a length as 32k or 1M if it is a whole number of k or M, otherwise as digits."""
    for unit, size in (("M", 1024 * 1024), ("k", 1024)):
        if tokens >= size and tokens % size == 0:
            return f"{tokens // size}{unit}"
    return str(tokens)
