"""Memories: models that read segments and keep states of earlier ones, at distances of any length (XLNet)."""

import dataclasses
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

    Attributes:
        is_limited: Whether config.json limits the number of states. Otherwise the lengths are the default of the class.
    """

    is_limited: bool = True

    @property
    def limits_inputs(self) -> bool:
        """False: a segment may have any length."""
        return False

    @property
    def feature(self) -> str:
        """The feature that engines must support: a memory of states."""
        return "memory"

    @override
    def describe(self) -> str:
        kept = f"{self.context_length} states" if self.is_limited else "all states"
        return f"relative sinusoids, computed for any distance; each layer keeps {kept} of earlier segments (mem_len)"

    @override
    def to_record(self) -> dict[str, Any]:
        record = super().to_record()
        return record if self.is_limited else {"trained_length": record["trained_length"]}

    @override
    def restore_source(self, record: Mapping[str, Any]) -> Self:
        length = record.get("source_length")
        return dataclasses.replace(self, context_length=length or self.trained_length, is_limited=length is not None)

    @override
    def at_length(self, length: int) -> Self:
        return dataclasses.replace(super().at_length(length), is_limited=True)

    @override
    def state_length(self, text: Config, family: Family) -> None:
        text[family.length_key] = self.context_length if self.is_limited else None

    @override
    def cautions(self, config: Config, family: Family, *, is_changed: bool) -> tuple[str, ...]:
        if read_memory(config, family).is_limited:
            return ()
        return (f"the source keeps the states of all earlier segments, the result only {self.context_length}.",)


def read_memory(config: Config, family: Family, original_length: int | None = None) -> Memory:
    """Read the number of states; the class keeps all of them if it is null or 0."""
    length = read(config, family, "max_position_embeddings")
    if is_limited := length not in (None, 0):
        if not isinstance(length, int) or isinstance(length, bool) or length < 1:
            raise CtxextError(f'config.json has no usable {family.length_key}: "{length}".')
    else:
        length = family.defaults["max_position_embeddings"]
    trained = original_length or provenance(config).get("trained_length") or length
    return Memory(int(trained), int(length), is_limited)
