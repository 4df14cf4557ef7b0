"""A user's text as a haystack."""

import re
from pathlib import Path

from ctxext.errors import CtxextError

_SENTENCE_END = re.compile(r"(?<=[.!?。！？])\s+|\n\s*\n")


def sentences_of(text: str) -> tuple[str, ...]:
    """A text cut at the ends of sentences and paragraphs, white space made even."""
    return tuple(" ".join(unit.split()) for unit in _SENTENCE_END.split(text) if unit.strip())


def read_haystack(path: Path) -> tuple[str, ...]:
    """A text file as sentences, to be joined by spaces.

    Raises:
        CtxextError: the file cannot be read or holds no text.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CtxextError(f'The haystack "{path}" cannot be read: {error}.', hint="Give a UTF-8 text file.") from error
    units = sentences_of(text)
    if not units:
        raise CtxextError(f'The haystack "{path}" is empty.', hint="Give a text file with some pages of prose.")
    return units
