"""The files beside config.json that state a length, brought into agreement with it (docs/traps.md, trap 11)."""

import math
from collections.abc import Sequence
from pathlib import Path

from ctxext.checkpoint import Checkpoint
from ctxext.files import as_json
from ctxext.reading.json_text import with_number
from ctxext.reading.strict import read_text
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
    """tokenizer.json, where it cuts texts at the old length. What it pads to is left: that changes no token."""
    path = source.folder / "tokenizer.json"
    if not path.is_file():
        return {}
    text = with_number(read_text(path), str(path), ("truncation", "max_length"), new, old=old)
    return {} if text is None else {path.name: text}


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


def _set(source: Checkpoint, texts: dict[str, str], name: str, key: str, value: int, *, inside: str = "") -> None:
    """Put a number into the text of a JSON file, and leave every other byte as it was."""
    path: Path = source.folder / name
    before = texts[name] if name in texts else read_text(path)
    keys = (inside, key) if inside else (key,)
    texts[name] = with_number(before, str(path), keys, value) or before
