"""Models without positions in the layers that attend to the whole context (NoPE): their length is only declared."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from typing_extensions import override

from ctxext.checkpoint.families import Family
from ctxext.checkpoint.geometry import claimed_length
from ctxext.errors import CtxextError
from ctxext.recipes.encodings.base import Config, Encoding, provenance
from ctxext.recipes.encodings.dialects import write_length


@dataclass(frozen=True)
class NoPositions(Encoding):
    """A context length without positions that it limits: attention without positions, or layers with a state.

    Attributes:
        is_raised: Whether ctxext raised the length.
    """

    is_raised: bool = False

    @property
    def is_scaled(self) -> bool:
        """Whether ctxext raised the length; the source may declare more than its original context length."""
        return self.is_raised and super().is_scaled

    @property
    def feature(self) -> str:
        """The length in config.json."""
        return "length"

    @override
    def describe(self) -> str:
        return "no positions in the layers that attend to the whole context, so no position is out of range"

    @override
    def restore_source(self, record: Mapping[str, Any]) -> Self:
        length = int(record.get("source_length") or self.trained_length)
        return dataclasses.replace(self, context_length=length, is_raised=False)

    @override
    def at_length(self, length: int) -> Self:
        return dataclasses.replace(super().at_length(length), is_raised=True)

    @override
    def state_length(self, text: Config, family: Family) -> None:
        write_length(text, family, self.context_length)


def has_length(config: Config, family: Family) -> bool:
    """Return whether a configuration or its class specifies a context length."""
    length = claimed_length(config, family)
    return isinstance(length, int) and not isinstance(length, bool) and length > 0


def read_no_positions(config: Config, family: Family, original_length: int | None = None) -> NoPositions:
    """Read the context length of a model without positions."""
    length, recorded = claimed_length(config, family), provenance(config).get("trained_length")
    if not has_length(config, family):
        raise CtxextError(
            f'"{family.model_type}" has no position embeddings, and config.json no usable context length: "{length}".',
            hint="Add max_position_embeddings to config.json if engines need a length.",
        )
    return NoPositions(int(original_length or recorded or length), length, bool(recorded))
