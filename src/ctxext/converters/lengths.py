"""The files beside config.json that state a length, brought into agreement with it (docs/traps.md, trap 11)."""

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ctxext.checkpoint import Checkpoint
from ctxext.files import as_json
from ctxext.recipes.encoding import Encoding
from ctxext.recipes.new_tensor import SIZES, NewTensor

_UNLIMITED = 10**12
_INDEX = "model.safetensors.index.json"
_FOLLOWING = (
    ("tokenizer_config.json", "max_len"),
    ("generation_config.json", "max_length"),
    ("sentence_bert_config.json", "max_seq_length"),
)
"""Numbers that follow the context length where they are the old one; people may have chosen others on purpose."""

_TRUNCATION = re.compile(r'("truncation"\s*:\s*\{[^{}]*"max_length"\s*:\s*)([0-9]+)')
_BEGINNING = 4096


def length_files(source: Checkpoint, before: Encoding, after: Encoding) -> dict[str, str]:
    """The texts of the files that state the context length, with the new one; only those that change."""
    texts: dict[str, str] = {}
    tokenizer = source.read_json("tokenizer_config.json")
    if tokenizer is not None and 0 < (tokenizer.get("model_max_length") or 0) < _UNLIMITED:
        _set(source, texts, "tokenizer_config.json", "model_max_length", after.claimed_length)
    for name, key in _FOLLOWING:
        content = source.read_json(name)
        if content is not None and content.get(key) == before.claimed_length:
            _set(source, texts, name, key, after.claimed_length)
    texts.update(_truncation(source, before.claimed_length, after.claimed_length))
    return texts


def _truncation(source: Checkpoint, old: int, new: int) -> dict[str, str]:
    """tokenizer.json, where it cuts texts at the old length. The key stands at the beginning of a long file."""
    path = source.folder / "tokenizer.json"
    if not path.is_file():
        return {}
    with path.open(encoding="utf-8", errors="replace") as file:
        found = _TRUNCATION.search(file.read(_BEGINNING))
    if found is None or int(found[2]) != old:
        return {}
    return {path.name: _TRUNCATION.sub(rf"\g<1>{new}", path.read_text(encoding="utf-8"), count=1)}


def index_files(source: Checkpoint, rewritten: Sequence[NewTensor]) -> dict[str, str]:
    """The index of sharded weights with the sizes and names that new tensors leave; nothing where there is none."""
    index = source.read_json(_INDEX)
    if not rewritten or not isinstance(index, dict):
        return {}
    texts: dict[str, str] = {}
    added = {tensor.name: tensor.path.as_posix() for tensor in rewritten if tensor.old_shape is None}
    if added:
        texts[_INDEX] = as_json({**index, "weight_map": {**index["weight_map"], **added}})
    more = {tensor.name: math.prod(tensor.shape) - _old_count(tensor) for tensor in rewritten}
    size = sum(more[tensor.name] * SIZES.get(tensor.dtype, 4) for tensor in rewritten)
    metadata = index.get("metadata")
    for key, count in (("total_size", size), ("total_parameters", sum(more.values()))):
        if isinstance(metadata, dict) and isinstance(metadata.get(key), int | float):
            _set(source, texts, _INDEX, key, int(metadata[key]) + count, inside="metadata")
    return texts


def _old_count(tensor: NewTensor) -> int:
    return 0 if tensor.old_shape is None else math.prod(tensor.old_shape)


def _set(
    source: Checkpoint, texts: dict[str, str], name: str, key: str, value: int, *, inside: str | None = None
) -> None:
    """Put a number into the text of a JSON file, and leave every other byte as it was where that is possible."""
    path: Path = source.folder / name
    before = texts.get(name) or path.read_text(encoding="utf-8")
    text, count = re.subn(rf'("{key}"\s*:\s*)[0-9.eE+]+', rf"\g<1>{value}", before)
    texts[name] = text if count == 1 else as_json(_replaced(json.loads(before), key, value, inside))


def _replaced(content: dict[str, Any], key: str, value: int, inside: str | None) -> dict[str, Any]:
    return {**content, inside: {**content[inside], key: value}} if inside else {**content, key: value}
