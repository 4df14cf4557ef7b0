"""Lengths in tokens, human-readable: 32768, 32k, 128K, 1M."""

import re

from ctxext.errors import CtxextError
from ctxext.reading.schemas import LONGEST

_UNITS = {"": 1, "k": 1024, "m": 1024 * 1024}


def parse_length(text: str) -> int:
    """Read a number of tokens; k is 1024 and M is 1024 k.

    Raises:
        CtxextError: the text is not a positive length, or exceeds any context.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kKmM]?)\s*", text)
    value = float(match[1]) * _UNITS[match[2].lower()] if match else 0.0
    check_length(value)
    if value < 1 or value != int(value):
        raise CtxextError(f'"{text}" is not a length in tokens.', hint="Write 32768, 32k, 128K or 1M.")
    return int(value)


def check_length(tokens: float) -> None:
    """Check that a length is one that a context can have.

    Raises:
        CtxextError: it is too long.
    """
    if tokens > LONGEST:
        raise CtxextError(f"{tokens:.3g} tokens are more than any context has.", hint=f"At most {LONGEST}.")


def format_length(tokens: int) -> str:
    """A length, human-readable: 32k if it is a whole number of k, digits otherwise."""
    for unit, size in (("M", 1024 * 1024), ("k", 1024)):
        if tokens >= size and tokens % size == 0:
            return f"{tokens // size}{unit}"
    return str(tokens)
