"""What makes the header of a safetensors file valid: the rules of the library that loads it, and nothing looser.

A reader that checks less than the library accepts files in which tensors share bytes or leave some out, and whoever
writes such a file anew writes garbage. The rules are those of `Metadata::validate` and of the header's types in
safetensors 0.8 (https://github.com/huggingface/safetensors).
"""

import math
from collections.abc import Mapping
from typing import Any

BITS: Mapping[str, int] = {
    "F4": 4,
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}
"""The size of a number in bits, by safetensors' name of its type."""

_LARGEST = 2**64


def fault_of_tensors(tensors: Mapping[str, Mapping[str, Any]], size: int) -> str:
    """Why no safetensors file has these tensors; empty where one may have.

    In the order of their offsets, tensors follow one another without a gap and without sharing a byte, from the first
    byte after the header to the last of the file, and each has as many bytes as its shape and type need.

    Args:
        tensors: Name to dtype, shape and offsets, of the right types.
        size: Bytes of the file after the header.
    """
    end = 0
    for name, entry in sorted(tensors.items(), key=lambda item: item[1]["data_offsets"]):
        start, stop = entry["data_offsets"]
        if start != end:
            return f'"{name}" begins at byte {start}, and what stands before it ends at {end}'
        bits = BITS.get(entry["dtype"])
        if bits is None:
            return f'"{name}" has the type "{entry["dtype"]}", which safetensors does not have'
        if any(count >= _LARGEST for count in _partial_products([*entry["shape"], bits])):
            return f'"{name}" has a shape that no file holds'
        if math.prod(entry["shape"]) * bits != 8 * (stop - start):
            return f'"{name}" has {stop - start} bytes, and its shape and type need others'
        end = stop
    return "" if end == size else f"the tensors end at byte {end}, and the file at {size}"


def _partial_products(factors: list[int]) -> list[int]:
    """The products on the way: one that overflows is refused, even where a later factor is 0."""
    products, product = [], 1
    for factor in factors:
        product *= factor
        products.append(product)
    return products


def fault_of_metadata(metadata: Any) -> str:
    """Why a header cannot have these notes; empty where it may: safetensors keeps words under words."""
    if metadata is None:
        return ""
    if not isinstance(metadata, dict):
        return '"__metadata__" is not an object'
    wrong = next((key for key, value in metadata.items() if not isinstance(value, str)), None)
    return "" if wrong is None else f'"__metadata__" holds under "{wrong}" what is not a string'
