"""One number in the text of a JSON file replaced by another, every other character as it was."""

import json
from collections.abc import Sequence

from ctxext.errors import CtxextError

_SPACE = " \t\n\r"
_DECODER = json.JSONDecoder()


def with_number(text: str, name: str, keys: Sequence[str], number: int, *, old: int | None = None) -> str | None:
    """A JSON text with another number at a place, whatever order, nesting or escapes the keys come in.

    Args:
        text: The text; a byte-order mark is taken away.
        name: What errors call the file.
        keys: The keys of objects on the way, the number's own last.
        number: What takes its place.
        old: The number that must stand there; any where None.

    Returns:
        The new text; None where there is no such place, or another value.

    Raises:
        CtxextError: the text is no JSON, or names a key on the way twice.
    """
    text = text.removeprefix("\ufeff")
    begin, end = 0, len(text)
    try:
        for key in keys:
            place = _value_of(text, begin, key, name)
            if place is None:
                return None
            begin, end = place
        if old is not None and text[begin:end] != str(old):
            return None
    except (ValueError, RecursionError) as error:
        raise CtxextError(f'"{name}" is not valid JSON: {str(error).splitlines()[0]}.') from error
    return f"{text[:begin]}{number}{text[end:]}"


def _value_of(text: str, at: int, wanted: str, name: str) -> tuple[int, int] | None:
    """Where the value of a key begins and ends in the object that begins here; None where there is none."""
    at, place = _skip(text, at), None
    if text[at : at + 1] != "{":
        return None
    while text[at] in "{,":
        at = _skip(text, at + 1)
        if text[at : at + 1] == "}":
            break
        key, at = _DECODER.raw_decode(text, at)
        at = _skip(text, at)
        if text[at : at + 1] != ":":
            raise ValueError(f"Expecting ':' at character {at}")
        begin = _skip(text, at + 1)
        _, end = _DECODER.raw_decode(text, begin)
        if key == wanted and place is not None:
            raise CtxextError(f'"{name}" has the key "{wanted}" twice.', hint="Keep one of the two.")
        place = (begin, end) if key == wanted else place
        at = _skip(text, end)
        if text[at : at + 1] not in (",", "}"):
            raise ValueError(f"Expecting ',' at character {at}")
    return place


def _skip(text: str, at: int) -> int:
    while text[at : at + 1] and text[at] in _SPACE:
        at += 1
    return at
