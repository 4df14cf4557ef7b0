"""Write a safetensors file with some tensors anew and every other byte the source's, in little memory.

The tensors keep the source's order, so the data stays aligned as it was: rows have the size of rows.
"""

import json
import math
import mmap
import struct
from collections.abc import Iterator, Sequence
from io import RawIOBase
from pathlib import Path
from typing import Any, BinaryIO

from ctxext.checkpoint.new_tensor import SIZES, NewTensor
from ctxext.checkpoint.opening import read_safetensors_header
from ctxext.converters.links import copy_range
from ctxext.errors import CtxextError
from ctxext.files.content import Progress, open_regular

REWRITTEN = "rewritten"
"""How a file came to its place that holds such a tensor."""

_ALIGNMENT = 8


def rewrite(origin: Path, target: Path, tensors: Sequence[NewTensor], progress: Progress | None = None) -> str:
    """Write a file's copy in which some tensors are others; gives how it was done.

    Args:
        origin: A safetensors file.
        target: Its new place, where nothing is.
        tensors: What becomes of some of its tensors.
        progress: Called with the file's name, bytes done and bytes in all.

    Raises:
        CtxextError: a tensor does not come out as large as was planned, or the file changed meanwhile.
    """
    new = {tensor.name: tensor for tensor in tensors}
    header = read_safetensors_header(origin)
    ordered = sorted(header, key=lambda name: header[name]["data_offsets"])
    added = [name for name in new if name not in header]
    sizes = {name: _size(header[name], new.get(name)) for name in ordered}
    sizes |= {name: _bytes(new[name].shape, new[name].dtype) for name in added}
    with open_regular(origin) as reading, target.open("wb", buffering=0) as writing:
        length = struct.unpack("<Q", reading.read(8))[0]
        text = _header(json.loads(reading.read(length)), [*ordered, *added], sizes, new)
        _write(writing, text)
        base, total = 8 + length, len(text) + sum(sizes.values())
        for start, end, name in _runs(ordered, header, new):
            if name:
                _write_new(reading, writing, (base + start, base + end), new[name], sizes[name])
            else:
                copy_range(reading.fileno(), writing.fileno(), base + start, end - start, target)
            if progress is not None:
                progress(target.name, writing.tell(), total)
        for name in added:
            _write_pieces(writing, memoryview(b""), new[name], sizes[name])
    return REWRITTEN


def _runs(ordered: Sequence[str], header: dict[str, Any], new: dict[str, NewTensor]) -> Iterator[tuple[int, int, str]]:
    """Where to write what: begin and end in the source's data, and the name of a tensor that changes, or none."""
    begin = end = 0
    for name in ordered:
        start, end = header[name]["data_offsets"]
        if name in new:
            yield begin, start, ""
            yield start, end, name
            begin = end
    yield begin, end, ""


def _size(entry: dict[str, Any], tensor: NewTensor | None) -> int:
    """The size of a tensor's bytes in the result."""
    start, end = entry["data_offsets"]
    if tensor is None:
        return int(end - start)
    assert tensor.old_shape is not None, "the source has it"
    return int((end - start) // math.prod(tensor.old_shape) * math.prod(tensor.shape))


def _bytes(shape: Sequence[int], dtype: str) -> int:
    """The size of a tensor that the source does not have."""
    return math.prod(shape) * SIZES[dtype]


def _header(content: dict[str, Any], ordered: Sequence[str], sizes: dict[str, int], new: dict[str, NewTensor]) -> bytes:
    """The length and the text of the header, with the shapes and the places of the result."""
    at = 0
    for name in ordered:
        entry = content.get(name, {})
        shape = list(new[name].shape) if name in new else entry["shape"]
        entry = {"dtype": new[name].dtype} if name not in content else entry
        content[name] = {**entry, "shape": shape, "data_offsets": [at, at + sizes[name]]}
        at += sizes[name]
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def _write_new(reading: BinaryIO, writing: RawIOBase, place: tuple[int, int], tensor: NewTensor, size: int) -> None:
    """Write one tensor from the source's bytes of it, which stay on the disk."""
    whole = mmap.mmap(reading.fileno(), 0, access=mmap.ACCESS_READ)
    with whole, memoryview(whole) as view, view[slice(*place)] as raw:
        _write_pieces(writing, raw, tensor, size)


def _write_pieces(writing: RawIOBase, raw: memoryview, tensor: NewTensor, size: int) -> None:
    written = 0
    for piece in tensor.pieces(raw):
        _write(writing, piece)
        written += len(piece)
    if written != size:
        raise CtxextError(f'"{tensor.name}" came out as {written} bytes, not {size}.')


def _write(writing: RawIOBase, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[writing.write(view) or 0 :]
