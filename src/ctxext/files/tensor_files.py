"""Safetensors files: read headers strictly, read tensors one at a time, and rewrite files in little memory.

Headers are read without the library because its `safe_open` imports numpy (90 ms, 16 MB). The rules are those of
`Metadata::validate` and of the header's types in safetensors 0.8 (https://github.com/huggingface/safetensors). They
matter here: a file with overlapping tensors would be rewritten incorrectly.
"""

import errno
import itertools
import json
import math
import operator
import os
import re
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from ctxext.errors import CtxextError
from ctxext.files.content import Progress, open_regular
from ctxext.files.strict import parse_json

if TYPE_CHECKING:
    from hashlib import _Hash

BITS: Mapping[str, int] = {
    "F4": 4,
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}
"""Size in bits by safetensors type."""
TORCH_NAMES: Mapping[str, str] = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Types that are supported for computation: torch names by safetensors names."""

_MAX_HEADER_BYTES = 100_000_000
_LARGEST = 1 << 64
_MOST_DIMENSIONS = 64
"""numpy's maximum number of dimensions."""
_JSON_SPACES = " \t\r\n"
_ALIGNMENT = 8
_PIECE, _LARGE_PIECE = 1 << 22, 1 << 26
BLOCK = 4096
"""Block size of the usual file systems, in bytes."""
CANNOT = frozenset(
    {errno.EXDEV, errno.EPERM, errno.EACCES, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS}
    | {errno.EINVAL, errno.ENOTTY, errno.EBADF, errno.EROFS, errno.ETXTBSY}
)
"""Errors of file systems that cannot clone, link or copy in the kernel; the next method is then used."""


def read_safetensors_header(path: Path) -> dict[str, Any]:
    """Read and validate the header of a safetensors file; the tensors are not read.

    Returns:
        Type, shape and offsets by tensor name.
    """

    def invalid_header(fault: str = "") -> CtxextError:
        reason = f": {fault}" if fault else ""
        return CtxextError(
            f'"{path.name}" is truncated or not a safetensors file{reason}.', hint="Download the file again."
        )

    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(_MAX_HEADER_BYTES, size - 8):
            raise invalid_header()
        try:
            text = file.read(length).decode()
        except UnicodeDecodeError as error:
            raise invalid_header() from error
    if not text.lstrip(_JSON_SPACES).startswith("{"):
        raise invalid_header()
    header = parse_json(text, path.name, constants=False)
    notes = header.pop("__metadata__", None)
    if notes is not None and not (isinstance(notes, dict) and all(isinstance(note, str) for note in notes.values())):
        raise invalid_header('"__metadata__" is not an object of strings')
    if fault := _fault_of(header, size - 8 - length):
        raise invalid_header(fault)
    return header  # type: ignore[no-any-return]


def _fault_of(tensors: Mapping[str, Any], size: int) -> str:
    """Return the reason why tensors do not fill exactly `size` bytes after a header; empty if they do.

    Sorted by offset, tensors must be contiguous without overlap, with as many bytes as shape and type require.
    """
    for name, entry in tensors.items():
        match entry:
            case {"dtype": str(), "shape": [*shape], "data_offsets": [start, stop]} if all(
                type(number) is int and 0 <= number < _LARGEST for number in (*shape, start, stop)
            ):
                continue
        return f'"{name}" has no type, shape and offsets'
    end = 0
    for name, entry in sorted(tensors.items(), key=lambda item: item[1]["data_offsets"]):
        start, stop = entry["data_offsets"]
        if start != end:
            return f'"{name}" begins at byte {start}, but the previous tensor ends at byte {end}'
        if entry["dtype"] not in BITS:
            return f'"{name}" has the unknown type "{entry["dtype"]}"'
        # The library rejects a product that overflows, even if a later factor is 0.
        products = list(itertools.accumulate((*entry["shape"], BITS[entry["dtype"]]), operator.mul))
        if max(products) >= _LARGEST or len(entry["shape"]) > _MOST_DIMENSIONS:
            return f'the shape of "{name}" is too large'
        if products[-1] != 8 * (stop - start):
            return f'"{name}" has {stop - start} bytes, which does not match its shape and type'
        end = stop
    return "" if end == size else f"the tensors end at byte {end}, but the file ends at byte {size}"


def read_tensors(path: Path, *names: str) -> Iterator[tuple[str, dict[str, Any], Iterator[bytes]]]:
    """Yield the tensors of a file in its order: name, header entry, and the bytes piece by piece.

    Args:
        path: A safetensors file.
        names: The tensors to read; by default all.
    """
    header = read_safetensors_header(path)
    with path.open("rb") as file:
        base = 8 + struct.unpack("<Q", file.read(8))[0]
        for name in sorted(names or header, key=lambda name: header[name]["data_offsets"]):
            start, end = header[name]["data_offsets"]
            file.seek(base + start)
            yield name, header[name], _pieces(file, end - start)


def read_tensor(path: Path, name: str) -> bytes:
    """Return the bytes of one tensor of a file."""
    return b"".join(piece for _, _, pieces in read_tensors(path, name) for piece in pieces)


def _pieces(file: BinaryIO, size: int) -> Iterator[bytes]:
    while size:
        piece = file.read(min(size, _PIECE))
        if not piece:
            raise _shorter(Path(file.name))
        yield piece
        size -= len(piece)


def _shorter(path: Path) -> CtxextError:
    return CtxextError(f'"{path.name}" was truncated while it was read.', hint="Run the same command again.")


def format_tensor_names(names: Sequence[str]) -> str:
    """Format tensor names in one line; names that differ only in the layer number are combined with their count."""
    counts = Counter(re.sub(r"\.\d+\.", ".*.", name) for name in names)
    return ", ".join(f"{name} × {count}" if count > 1 else name for name, count in counts.items())


@dataclass(frozen=True)
class NewTensor:
    """A changed or additional tensor of a rewritten file.

    Attributes:
        name: Name in the source and in the result.
        path: Its safetensors file, relative to the checkpoint.
        dtype: Safetensors type, the same as in the source.
        old_shape: Shape in the source; None for an additional tensor.
        shape: New shape.
        pieces: Yields the new bytes, from the source's bytes (empty for an additional tensor).
    """

    name: str
    path: Path
    dtype: str
    old_shape: tuple[int, ...] | None
    shape: tuple[int, ...]
    pieces: Callable[[memoryview], Iterator[bytes]]

    @property
    def size(self) -> int:
        """Number of bytes."""
        return math.prod(self.shape) * BITS[self.dtype] // 8

    def __str__(self) -> str:
        """Return the name, the old shape and the new shape."""
        before = "new," if self.old_shape is None else f"{'×'.join(map(str, self.old_shape))} →"
        return f"{self.name} {before} {'×'.join(map(str, self.shape))}"


def rewrite(
    origin: Path,
    target: Path,
    tensors: Sequence[NewTensor],
    progress: Progress | None = None,
    *,
    digest: "_Hash | None" = None,
) -> None:
    """Copy a file with some tensors replaced or added; all other bytes are unchanged.

    The tensors keep their order, so the alignment of the data is unchanged. Additional tensors come last. Only one
    changed tensor is in memory at a time.

    Args:
        origin: A safetensors file.
        target: The new file.
        tensors: The changed and the additional tensors.
        progress: Called with the file's name, the bytes done and the total bytes.
        digest: Hash to update with all written bytes; without it, the kernel copies.
    """
    new = {tensor.name: tensor for tensor in tensors}
    header = read_safetensors_header(origin)
    ordered = sorted(header, key=lambda name: header[name]["data_offsets"])
    added = [tensor for tensor in tensors if tensor.name not in header]
    with origin.open("rb") as reading, target.open("wb", buffering=0) as writing:
        head = reading.read(8)
        head += reading.read(struct.unpack("<Q", head)[0])
        base, total, done = len(head), 0, 0

        def advance(count: int) -> None:
            nonlocal done
            done += count
            if progress is not None:
                progress(target.name, done, total)

        def write(content: bytes) -> None:
            view = memoryview(content)
            while view:
                view = view[writing.write(view) or 0 :]
            if digest is not None:
                digest.update(content)
            advance(len(content))

        def copy(start: int, end: int) -> None:
            if digest is None:
                for count in copy_range(reading, writing, base + start, end - start):
                    advance(count)
            else:
                reading.seek(base + start)
                for piece in _pieces(reading, end - start):
                    write(piece)

        def write_new(tensor: NewTensor, raw: bytes) -> None:
            before = done
            for piece in tensor.pieces(memoryview(raw)):
                write(piece)
            if done - before != tensor.size:
                raise CtxextError(f'"{tensor.name}" has {done - before} bytes, expected {tensor.size}.')

        if added or any(tensor.old_shape != tensor.shape for tensor in tensors):
            head = _new_head(json.loads(head[8:]), [*ordered, *(tensor.name for tensor in added)], new)
        sizes = (header[name]["data_offsets"] for name in ordered if name not in new)
        total = len(head) + sum(end - start for start, end in sizes) + sum(tensor.size for tensor in tensors)
        write(head)
        copied = stop = 0
        for name in ordered:
            start, stop = header[name]["data_offsets"]
            if name in new:
                copy(copied, start)
                reading.seek(base + start)
                write_new(new[name], b"".join(_pieces(reading, stop - start)))
                copied = stop
        copy(copied, stop)
        for tensor in added:
            write_new(tensor, b"")


def _new_head(content: dict[str, Any], ordered: Sequence[str], new: Mapping[str, NewTensor]) -> bytes:
    """Return a header with the shapes and offsets of the result, including its length."""
    at = 0
    for name in ordered:
        entry = content.get(name, {})
        start, stop = entry.get("data_offsets", (0, 0))
        size = new[name].size if name in new else stop - start
        described = {"dtype": new[name].dtype, "shape": list(new[name].shape)} if name in new else {}
        content[name] = {**entry, **described, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def copy_range(source: BinaryIO, target: BinaryIO, start: int, length: int) -> Iterator[int]:
    """Append a range of a file to an unbuffered file, in the kernel if possible; yield the size of each piece.

    The first piece ends at a block boundary of the source. If the target is then at a block boundary too, file systems
    with clones (XFS, Btrfs) share all later pieces without copying.

    Raises:
        OSError: The disk is full, or a file cannot be read or written.
    """
    in_kernel = hasattr(os, "copy_file_range")
    while length:
        try:
            if in_kernel:
                most = -start % BLOCK or _LARGE_PIECE
                done = os.copy_file_range(source.fileno(), target.fileno(), min(length, most), start)
            else:
                os.lseek(source.fileno(), start, os.SEEK_SET)
                done = os.write(target.fileno(), os.read(source.fileno(), min(length, _PIECE)))
        except OSError as error:
            if not in_kernel or error.errno not in CANNOT:
                raise
            in_kernel = False
            continue
        if not done:
            raise _shorter(Path(source.name))
        start, length = start + done, length - done
        yield done
