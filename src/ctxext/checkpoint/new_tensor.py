"""Tensors that a conversion writes anew or adds, and what a source has stored."""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ctxext.checkpoint.opening import Checkpoint, read_safetensors_header
from ctxext.errors import CtxextError

SIZES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2}
"""Bytes of a number of each type that tensors are made in, by the names of safetensors."""


@dataclass(frozen=True)
class NewTensor:
    """One tensor of the result.

    Attributes:
        name: Its name, in the source and in the result.
        path: The safetensors file that holds it, or shall, relative to the checkpoint.
        dtype: Its type as safetensors names it, which stays the source's.
        old_shape: The source's shape; None where the source has no such tensor.
        shape: Its shape from now on.
        pieces: Given the source's bytes, none where it has none, its own, a piece at a time.
    """

    name: str
    path: Path
    dtype: str
    old_shape: tuple[int, ...] | None
    shape: tuple[int, ...]
    pieces: Callable[[memoryview], Iterator[bytes]]

    def __str__(self) -> str:
        """What happens to it, in a few words."""
        before = "new," if self.old_shape is None else f"{_sizes(self.old_shape)} →"
        return f"{self.name} {before} {_sizes(self.shape)}"


def _sizes(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape))


def grouped(names: Sequence[str]) -> str:
    """Tensor names with the layers' numbers counted instead of listed."""
    counts = Counter(re.sub(r"\.\d+\.", ".*.", name) for name in names)
    return ", ".join(f"{name} × {count}" if count > 1 else name for name, count in counts.items())


def stored_tensors(source: Checkpoint) -> dict[str, tuple[Path, dict[str, Any]]]:
    """Every tensor that transformers would load from safetensors: its file and its entry.

    Raises:
        CtxextError: there are none, or two files hold one name.
    """
    tensors: dict[str, tuple[Path, dict[str, Any]]] = {}
    for path in source.loaded_safetensors:
        for name, entry in read_safetensors_header(source.folder / path).items():
            if name in tensors:
                raise CtxextError(f'"{path}" holds "{name}", which "{tensors[name][0]}" holds too.')
            tensors[name] = (path, entry)
    if not tensors:
        raise CtxextError(
            f'"{source.name}" holds its weights as pytorch_model.bin, of which no part can be rewritten alone.',
            hint="Load it once and save_pretrained it, which writes safetensors; then convert that.",
        )
    return tensors
