"""The header of a GGUF file: strict reading, and writing that keeps the bytes of unchanged values.

Layout: magic, version, number of tensors, number of keys, the keys, the tensors' descriptions, padding, the tensors.
The rules are those of llama.cpp's own reader (`ggml/src/gguf.cpp`, https://github.com/ggml-org/llama.cpp), which
refuses a gap or an overlap between tensors. Values are bytes that are decoded only on access, so tokenizers and chat
templates remain unchanged.
"""

import itertools
import math
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ctxext.errors import CtxextError
from ctxext.files.content import open_regular
from ctxext.redaction import shorten

MAGIC = b"GGUF"
ALIGNMENT_KEY = "general.alignment"
FILE_TYPE_KEY = "general.file_type"
_VERSIONS = (2, 3)
_USUAL_ALIGNMENT = 32
_STRING, _ARRAY = 8, 9
_SCALARS: Mapping[int, str] = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
"""Packing formats of values, by the number of their type."""
UINT32, INT32, FLOAT32, STRING = 4, 5, 6, _STRING
F32 = 0
"""The type of a tensor of float32."""
_SIZES: Mapping[int, tuple[str, int, int]] = {
    **{0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22)},
    **{7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 36), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110)},
    **{12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292)},
    **{16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50)},
    **{20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136)},
    **{24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8)},
    **{29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66)},
    **{39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36)},
}
"""Name, weights per block and bytes per block, by the number of a tensor's type."""
FILE_TYPES: Mapping[int, str] = {
    **dict(enumerate(("F32", "F16", "Q4_0", "Q4_1"))),
    **dict(enumerate(("Q8_0", "Q5_0", "Q5_1", "Q2_K", "Q3_K_S", "Q3_K_M", "Q3_K_L", "Q4_K_S", "Q4_K_M"), 7)),
    **dict(enumerate(("Q5_K_S", "Q5_K_M", "Q6_K", "IQ2_XXS", "IQ2_XS", "Q2_K_S", "IQ3_XS", "IQ3_XXS", "IQ1_S"), 16)),
    **dict(enumerate(("IQ4_NL", "IQ3_S", "IQ3_M", "IQ2_S", "IQ2_M", "IQ4_XS", "IQ1_M", "BF16"), 25)),
    **dict(enumerate(("TQ1_0", "TQ2_0", "MXFP4_MOE", "NVFP4", "Q1_0", "Q2_0"), 36)),
}
"""Names of the types of a whole file, by their number in `general.file_type` (`llama_ftype` of llama.cpp)."""
_MOST_HEADER = 1 << 28
_MOST_VALUES, _MOST_TENSORS = 1 << 16, 1 << 20
"""Maximum counts of values and tensors, because each needs many times its bytes in memory."""
_MOST_NAME = 64
_MOST_DIMENSIONS = 4
_PIECE = 1 << 20


@dataclass(frozen=True)
class Value:
    """A value of the header, as its bytes.

    Attributes:
        kind: The number of its type.
        raw: Its bytes, without the type.
    """

    kind: int
    raw: bytes

    @property
    def content(self) -> Any:
        """The number, boolean or string; None for an array, which is not decoded."""
        if self.kind in _SCALARS:
            return struct.unpack(f"<{_SCALARS[self.kind]}", self.raw)[0]
        if self.kind != _STRING:
            return None
        try:
            return self.raw[8:].decode()
        except UnicodeDecodeError as error:
            shown = self.raw[8:72].decode("utf-8", "replace")
            raise CtxextError(
                f'The GGUF header has "{shown}", which is not UTF-8.', hint="Download the file again."
            ) from error


def shorten_value(value: Any) -> str:
    """Shorten a value of the header to one line, for errors."""
    return shorten(str(value), 40)


def value_of(content: float | str) -> Value:
    """Return a value to write: a string, an integer as uint32, or another number as float32.

    llama.cpp reads lengths as uint32 and bases and factors as float32, and refuses any other type.
    """
    if isinstance(content, str):
        text = content.encode()
        return Value(STRING, struct.pack("<Q", len(text)) + text)
    try:
        if isinstance(content, int):
            return Value(UINT32, struct.pack("<I", content))
        return Value(FLOAT32, struct.pack("<f", content))
    except (struct.error, OverflowError) as error:
        raise CtxextError(
            f"{content:g} is too large for a GGUF file.", hint="Choose a smaller factor or length."
        ) from error


@dataclass(frozen=True)
class Tensor:
    """The description of a tensor in the header.

    Attributes:
        name: Its name.
        shape: Its dimensions, the innermost first.
        kind: The number of its type.
        offset: Its first byte, counted from the first tensor.
    """

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int

    @property
    def type_name(self) -> str:
        """The name of its type: "Q4_K"."""
        return _SIZES[self.kind][0]

    @property
    def size(self) -> int:
        """Number of bytes."""
        _, block, size = _SIZES[self.kind]
        return math.prod(self.shape) // block * size

    def to_bytes(self) -> bytes:
        """Return its description in the header, as bytes."""
        name = self.name.encode()
        numbers = struct.pack(f"<I{len(self.shape)}QIQ", len(self.shape), *self.shape, self.kind, self.offset)
        return struct.pack("<Q", len(name)) + name + numbers


@dataclass(frozen=True)
class Header:
    """The header of one GGUF file.

    Attributes:
        version: The version of the format.
        values: The keys in their order.
        tensors: The tensors in their order.
        alignment: The alignment of each tensor, in bytes.
        data_start: The first byte of the tensors.
        data_size: The number of bytes from there to the end of the file.
    """

    version: int
    values: Mapping[str, Value]
    tensors: tuple[Tensor, ...]
    alignment: int
    data_start: int
    data_size: int

    def get(self, key: str, default: Any = None) -> Any:
        """Return the content of a key, or a default without it."""
        return self.values[key].content if key in self.values else default

    def to_bytes(self) -> bytes:
        """Return the header as bytes, padded to the alignment of the tensors."""
        content = [MAGIC, struct.pack("<IQQ", self.version, len(self.tensors), len(self.values))]
        for key, value in self.values.items():
            name = key.encode()
            content += [struct.pack("<Q", len(name)), name, struct.pack("<I", value.kind), value.raw]
        content += [tensor.to_bytes() for tensor in self.tensors]
        packed = b"".join(content)
        return packed + bytes(-len(packed) % self.alignment)


def read_header(path: Path) -> Header:
    """Read and check the header of a GGUF file; the tensors themselves are not read.

    Raises:
        OSError: it cannot be read.
    """
    with open_regular(path) as file:
        reader = _Reader(file, path.name)
        if reader.take(4) != MAGIC:
            raise CtxextError(f'"{path}" is not a GGUF file.', hint="For a checkpoint, specify its folder.")
        (version,) = reader.unpack("I")
        if version not in _VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            if swapped in _VERSIONS:
                raise CtxextError(
                    f'"{path}" is big-endian.', hint="Convert it with gguf-convert-endian of the gguf package."
                )
            raise CtxextError(
                f'"{path}" has version {version} of GGUF.', hint="Supported: 2 and 3. Convert the model again."
            )
        num_tensors, num_values = reader.unpack("QQ")
        if num_tensors > _MOST_TENSORS or num_values > _MOST_VALUES:
            raise reader.damage_error(f"its header specifies {num_values} keys and {num_tensors} tensors")
        values = dict(reader.values(num_values))
        tensors = tuple(reader.tensors(num_tensors))
        alignment = values[ALIGNMENT_KEY].content if ALIGNMENT_KEY in values else _USUAL_ALIGNMENT
        if type(alignment) is not int or not 0 < alignment <= _PIECE or alignment & (alignment - 1):
            raise CtxextError(f'"{path}" is damaged: its alignment is {alignment}.', hint="Download the file again.")
        data_start = reader.place + -reader.place % alignment
        if data_start > reader.size:
            raise reader.truncation_error()
        header = Header(version, values, tensors, alignment, data_start, reader.size - data_start)
    if fault := _fault_of(header):
        raise CtxextError(f'"{path}" is damaged: {fault}.', hint="Download the file again.")
    return header


class _Reader:
    """Reader of successive values that stops at the end of the file."""

    def __init__(self, file: BinaryIO, name: str) -> None:
        self.file, self.name = file, name
        self.size = os.fstat(file.fileno()).st_size
        self.place = 0

    def truncation_error(self) -> CtxextError:
        return CtxextError(
            f'"{self.name}" is truncated or damaged: its header extends past the end of the file (byte {self.size}).',
            hint="Download the file again.",
        )

    def take(self, length: int) -> bytes:
        if length > self.size - self.place:
            raise self.truncation_error()
        if self.place + length > _MOST_HEADER:
            raise CtxextError(
                f'"{self.name}" has a header of more than {_MOST_HEADER >> 20} MB.', hint="Download the file again."
            )
        self.place += length
        return self.file.read(length)

    def unpack(self, form: str) -> tuple[Any, ...]:
        return struct.unpack(f"<{form}", self.take(struct.calcsize(f"<{form}")))

    def text(self, owner: str, most: int = 65535) -> str:
        (length,) = self.unpack("Q")
        if not 0 < length <= most:
            raise self.damage_error(f"{owner} has a name of {length} bytes")
        try:
            return self.take(length).decode()
        except UnicodeDecodeError:
            raise self.damage_error(f"{owner} has a name that is not UTF-8") from None

    def damage_error(self, why: str) -> CtxextError:
        return CtxextError(f'"{self.name}" is damaged: {why}.', hint="Download the file again.")

    def values(self, count: int) -> Iterator[tuple[str, Value]]:
        seen = set()
        for _ in range(count):
            key = self.text("a key")
            if key in seen:
                raise self.damage_error(f'the key "{key}" occurs twice')
            seen.add(key)
            (kind,) = self.unpack("I")
            yield key, Value(kind, self.raw(key, kind))

    def raw(self, key: str, kind: int) -> bytes:
        """Read the bytes of a value; an array of strings is read string by string, without decoding."""
        if kind in _SCALARS:
            return self.take(struct.calcsize(f"<{_SCALARS[kind]}"))
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise self.damage_error(f'the key "{key}" has the unknown type {kind}')
        head = self.take(12)
        of, count = struct.unpack("<IQ", head)
        if of in _SCALARS:
            return head + self.take(count * struct.calcsize(f"<{_SCALARS[of]}"))
        if of != _STRING:
            raise self.damage_error(f'the key "{key}" is an array of type {of}')
        if count * 8 > self.size - self.place:
            raise self.truncation_error()
        raw = bytearray(head)
        for _ in range(count):
            raw += self.string()
        return bytes(raw)

    def string(self) -> bytes:
        head = self.take(8)
        return head + self.take(struct.unpack("<Q", head)[0])

    def tensors(self, count: int) -> Iterator[Tensor]:
        seen = set()
        for _ in range(count):
            name = self.text("a tensor", _MOST_NAME)
            if name in seen:
                raise self.damage_error(f'the tensor "{name}" occurs twice')
            seen.add(name)
            (dimensions,) = self.unpack("I")
            if dimensions > _MOST_DIMENSIONS:
                raise self.damage_error(f'the tensor "{name}" has {dimensions} dimensions')
            *shape, kind, offset = self.unpack(f"{dimensions}QIQ")
            yield Tensor(name, tuple(shape), kind, offset)


def _fault_of(header: Header) -> str:
    """Return why llama.cpp would refuse these tensors; empty if it would not."""
    end = 0
    for tensor in header.tensors:
        if tensor.kind not in _SIZES:
            return f'the tensor "{tensor.name}" has the unknown type {tensor.kind}'
        if any(product >= 1 << 63 for product in itertools.accumulate(tensor.shape, lambda a, b: a * b)):
            return f'the tensor "{tensor.name}" has an impossible shape'
        if tensor.shape and tensor.shape[0] % _SIZES[tensor.kind][1]:
            return f'the tensor "{tensor.name}" has rows that are not whole blocks of {tensor.type_name}'
        if tensor.offset != end:
            return f'the tensor "{tensor.name}" begins at byte {tensor.offset}, expected {end}'
        end = tensor.offset + tensor.size
        if end > header.data_size:
            return f'the tensor "{tensor.name}" ends after the end of the file'
        end += -end % header.alignment
    return ""
