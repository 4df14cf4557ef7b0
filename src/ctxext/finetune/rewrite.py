"""Write a safetensors file again with some tensors changed, one tensor in memory at a time."""

import hashlib
import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from ctxext.checkpoint.opening import Checkpoint, read_safetensors_header
from ctxext.errors import CtxextError
from ctxext.finetune.tensors import BEFORE_QUANTIZING, Changes

_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_CHUNK = 1 << 22
Advance = Callable[[int], None]


def stored_shapes(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all tensors of a checkpoint, from its headers.

    Raises:
        CtxextError: its weights are not in safetensors files.
    """
    shapes = {name: tuple(entry["shape"]) for header in checkpoint.headers() for name, entry in header.items()}
    if not shapes:
        raise CtxextError(
            f'"{checkpoint.name}" has no safetensors weights to merge into.',
            hint="Save it with transformers once, or keep the adapter apart with --no-merge.",
        )
    return shapes


def check_type(name: str, dtype: str) -> None:
    """Refuse a tensor that holds no plain numbers, as those of quantized checkpoints do not.

    Args:
        name: The tensor.
        dtype: Its type, as safetensors calls it.

    Raises:
        CtxextError: nothing can be added to it.
    """
    if dtype not in _DTYPES:
        raise CtxextError(f'"{name}" is stored as {dtype}, which nothing can be merged into.', hint=BEFORE_QUANTIZING)


def rewrite(origin: Path, target: Path, changes: Changes, advance: Advance | None = None) -> str:
    """Write a file's tensors again in the same order, places and types.

    Args:
        origin: A safetensors file.
        target: The file to make.
        changes: The tensors that get new values.
        advance: Called with the bytes that were written.

    Returns:
        The SHA-256 of what was written.

    Raises:
        CtxextError: a tensor that changes is stored in a type that cannot be computed with or would hold numbers that
            are not finite, or the file has become shorter.
    """
    header = read_safetensors_header(origin)
    added = {head: name for head, name in changes.untied.items() if name in header and head not in header}
    digest = hashlib.sha256()
    with origin.open("rb") as reading, target.open("wb") as writing:

        def write(content: bytes) -> None:
            writing.write(content)
            digest.update(content)
            if advance is not None:
                advance(len(content))

        prefix = reading.read(8)
        content = reading.read(struct.unpack("<Q", prefix)[0])
        write(_with_entries(content, header, added) if added else prefix + content)
        kept: dict[str, bytes] = {}
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            begin, end = entry["data_offsets"]
            size = end - begin
            if name not in changes.names and name not in added.values():
                _copy(reading, size, write)
                continue
            content = _exactly(reading, size)
            kept.update((head, content) for head, embedding in added.items() if embedding == name)
            write(_changed(content, name, entry, changes))
        for head, name in added.items():
            write(_changed(kept[head], head, header[name], changes))
    return digest.hexdigest()


def _with_entries(content: bytes, header: Mapping[str, Any], added: Mapping[str, str]) -> bytes:
    """The head of a safetensors file with entries for tensors behind all others, as large as those they come from."""
    entries = json.loads(content)
    end = max(entry["data_offsets"][1] for entry in header.values())
    for head, name in added.items():
        start, stop = header[name]["data_offsets"]
        begin, end = end, end + stop - start
        entries[head] = {**header[name], "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _changed(content: bytes, name: str, entry: Mapping[str, Any], changes: Changes) -> bytes:
    """A tensor's new bytes."""
    if name not in changes.names:
        return content
    import torch

    dtype, shape = entry["dtype"], tuple(entry["shape"])
    check_type(name, dtype)
    stored = getattr(torch, _DTYPES[dtype])
    old = torch.frombuffer(bytearray(content), dtype=stored).reshape(shape)
    new = changes.new(name, old)
    if new.shape != old.shape:
        raise CtxextError(f'"{name}" was trained as {tuple(new.shape)} but is stored as {shape}.')
    new = new.to(stored)  # A number that is finite before may be too large for the stored type.
    if not torch.isfinite(new).all():
        raise CtxextError(
            f'"{name}" would hold numbers that are not finite in {dtype}.',
            hint="Look at the adapter: its lora_alpha, its alpha_pattern, and infinite numbers or NaN in its tensors.",
        )
    return new.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _copy(reading: BinaryIO, size: int, write: Callable[[bytes], None]) -> None:
    while size:
        piece = _exactly(reading, min(size, _CHUNK))
        write(piece)
        size -= len(piece)


def _exactly(reading: BinaryIO, size: int) -> bytes:
    """So many bytes, whose place was there when the header was read."""
    content = reading.read(size)
    if len(content) < size:
        raise CtxextError(f'"{reading.name}" became shorter while it was read.', hint="Run the same command again.")
    return content
