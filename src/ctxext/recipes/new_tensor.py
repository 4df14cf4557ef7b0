"""A tensor that a conversion writes anew, in the place of the source's of the same name."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class NewTensor:
    """One tensor of the result.

    Attributes:
        name: Its name, in the source and in the result.
        path: The safetensors file that holds it, relative to the checkpoint.
        dtype: Its type as safetensors names it, which stays the source's.
        old_shape: The source's shape.
        shape: Its shape from now on.
        pieces: Given the source's bytes, its own, a piece at a time.
    """

    name: str
    path: Path
    dtype: str
    old_shape: tuple[int, ...]
    shape: tuple[int, ...]
    pieces: Callable[[memoryview], Iterator[bytes]]

    def __str__(self) -> str:
        """What happens to it, in a few words."""
        return f"{self.name} {_sizes(self.old_shape)} → {_sizes(self.shape)}"


def _sizes(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape))
