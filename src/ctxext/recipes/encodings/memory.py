"""Memories: models that read segments and keep states of earlier ones, at distances of any length (XLNet)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from typing_extensions import override

from ctxext.checkpoint.families import Family, read
from ctxext.errors import CtxextError
from ctxext.recipes.encodings.base import Config, Encoding, provenance


@dataclass(frozen=True)
class Memory(Encoding):
    """Relative sinusoids, computed for any distance, and the states of earlier segments.

    Its context length is the number of these states; the tokens of the current segment come on top of it.
    """

    @property
    def feature(self) -> str:
        """The feature that engines must support: a memory of states."""
        return "memory"

    @override
    def describe(self) -> str:
        return (
            f"relative sinusoids, computed for any distance; each layer keeps {self.context_length} states of earlier "
            "segments (mem_len)"
        )

    @override
    def restore_source(self, record: Mapping[str, Any]) -> Self:
        return self.at_length(int(record.get("source_length") or self.trained_length))


def has_memory(config: Config, family: Family) -> bool:
    """Return whether a configuration limits the number of states."""
    length = read(config, family, "max_position_embeddings")
    return isinstance(length, int) and not isinstance(length, bool) and length > 0


def read_memory(config: Config, family: Family, original_length: int | None = None) -> Memory:
    """Read the number of states."""
    length = read(config, family, "max_position_embeddings")
    if not has_memory(config, family):
        raise CtxextError(
            f'config.json has no usable {family.length_key}: "{length}".',
            hint=f"Without a number, the model keeps all states. Add {family.length_key} to config.json to limit them.",
        )
    return Memory(int(original_length or provenance(config).get("trained_length") or length), length)
