"""Update the context length in files other than config.json (docs/traps.md, trap 11)."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ctxext.checkpoint.other_files import read_lengths, read_pipeline
from ctxext.errors import CtxextError
from ctxext.files.content import as_json
from ctxext.files.schemas import read_json_object
from ctxext.files.strict import read_text
from ctxext.files.tensor_files import BITS, NewTensor

_SPACE = " \t\n\r"
_DECODER = json.JSONDecoder()


def with_number(text: str, name: str, keys: Sequence[str], number: int, *, old: int | None = None) -> str | None:
    """Replace a number in a JSON text, for any order, nesting or escapes of the keys; return None if it is missing.

    Args:
        text: The text; a byte-order mark is removed.
        name: Name of the file in errors.
        keys: The keys of the objects on the path, the number's own last.
        number: The new number.
        old: The number to replace; None is returned if the text contains another one. Any number if None.
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


def _value_of(text: str, at: int, key_to_find: str, name: str) -> tuple[int, int] | None:
    """Return the start and end of a key's value in the object that begins at `at`; None if there is none."""
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
        if key == key_to_find and place is not None:
            raise CtxextError(f'"{name}" has the key "{key_to_find}" twice.', hint="Keep one of the two.")
        place = (begin, end) if key == key_to_find else place
        at = _skip(text, end)
        if text[at : at + 1] not in (",", "}"):
            raise ValueError(f"Expecting ',' at character {at}")
    return place


def _skip(text: str, at: int) -> int:
    while text[at : at + 1] and text[at] in _SPACE:
        at += 1
    return at


_UNLIMITED = 10**12
_INDEX = "model.safetensors.index.json"
_FOLLOWING = (
    ("tokenizer_config.json", "max_len"),
    ("generation_config.json", "max_length"),
)
"""Values that are updated only if they equal the old context length; others may be deliberate."""


def length_files(folder: Path, before: int, after: int, *, is_extended: bool) -> dict[str, str]:
    """Return the new texts of the files that contain the context length, by name, if they change.

    Args:
        folder: The source.
        before: Its context length in config.json, in tokens.
        after: That of the result.
        is_extended: Whether the result is longer than the original context length.
    """
    texts: dict[str, str] = {}
    tokenizer = _read(folder, "tokenizer_config.json")
    if tokenizer is not None and 0 < (tokenizer.get("model_max_length") or 0) < _UNLIMITED:
        _set(folder, texts, "tokenizer_config.json", "model_max_length", after)
    for name, key in _FOLLOWING:
        content = _read(folder, name)
        if content is not None and content.get(key) == before:
            _set(folder, texts, name, key, after)
    is_sentence_encoder = False
    if is_extended or after != before:
        # These silently truncate every text, often far below the context length, so all are updated.
        stated = read_lengths(folder)
        for name, key in stated:
            _set(folder, texts, name, key, after)
        is_sentence_encoder = bool(stated) or read_pipeline(folder) is not None
    old = None if is_sentence_encoder else before
    if old == after:  # The number would stay, and the file is large.
        return texts
    # Some versions of transformers read another file instead.
    versioned = (tokenizer or {}).get("fast_tokenizer_files")
    names = [name for name in versioned if isinstance(name, str)] if isinstance(versioned, list) else []
    for name in dict.fromkeys(("tokenizer.json", *(name for name in names if Path(name).name == name))):
        if not (path := folder / name).is_file():
            continue
        # Padding does not change any token, so it stays.
        keys = ("truncation", "max_length")
        if text := with_number(read_text(path), str(path), keys, after, old=old):
            texts[name] = text
    return texts


def _read(folder: Path, name: str) -> dict[str, Any] | None:
    return read_json_object(folder / name) if (folder / name).is_file() else None


def index_files(folder: Path, rewritten: Sequence[NewTensor]) -> dict[str, str]:
    """Return the index of sharded weights, updated for new tensors; empty if there is no index or no new tensor."""
    index = _read(folder, _INDEX)
    if not rewritten or not isinstance(index, dict):
        return {}
    texts: dict[str, str] = {}
    added = {tensor.name: tensor.path.as_posix() for tensor in rewritten if tensor.old_shape is None}
    if added:
        texts[_INDEX] = as_json({**index, "weight_map": {**index["weight_map"], **added}})
    more = {tensor.name: math.prod(tensor.shape) - math.prod(tensor.old_shape or (0,)) for tensor in rewritten}
    size = sum(more[tensor.name] * BITS[tensor.dtype] // 8 for tensor in rewritten)
    metadata = index.get("metadata")
    for key, count in (("total_size", size), ("total_parameters", sum(more.values()))):
        if isinstance(metadata, dict) and isinstance(metadata.get(key), int | float):
            _set(folder, texts, _INDEX, key, int(metadata[key]) + count, inside="metadata")
    return texts


def _set(folder: Path, texts: dict[str, str], name: str, key: str, value: int, *, inside: str = "") -> None:
    """Set a number in the text of a JSON file and leave every other byte unchanged."""
    path = folder / name
    before = texts[name] if name in texts else read_text(path)
    keys = (inside, key) if inside else (key,)
    texts[name] = with_number(before, str(path), keys, value) or before
