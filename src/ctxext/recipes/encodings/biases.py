"""Position encodings as biases on scores: ALiBi's fall with the distance, T5's are learned per bucket of distances."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from typing_extensions import override

from ctxext.checkpoint.families import Family, read, text_config
from ctxext.errors import CtxextError
from ctxext.recipes.encodings.base import Config, Encoding, provenance

_USUAL_BIAS_MAX = 8
_MOST = 2**31


@dataclass(frozen=True)
class Alibi(Encoding):
    """Biases that fall with the distance, with one slope per head.

    Attributes:
        num_heads: The number of slopes.
        bias_max: alibi_bias_max of MPT's config.json, for slopes of 2^(−bias_max·h/H), which transformers ignores.
        stops: Whether transformers cannot exceed the context length, as it computes no biases beyond it (MPT).
    """

    num_heads: int
    bias_max: float
    stops: bool

    @property
    def feature(self) -> str:
        """The feature that engines must support: ALiBi. Methods with code are listed separately."""
        return "alibi"

    @override
    def describe(self) -> str:
        end = ", although transformers does not support longer inputs" if self.stops else ""
        return (
            f"ALiBi: {self.num_heads} slopes, by which scores fall with the distance; no position beyond "
            f"{self.context_length} is out of range{end}, but far tokens fade"
        )

    @override
    def restore_source(self, record: Mapping[str, Any]) -> Self:
        return self.at_length(int(record.get("source_length") or self.trained_length))

    @override
    def cautions(self, config: Config, family: Family, *, is_changed: bool) -> tuple[str, ...]:
        # transformers ignores alibi_bias_max, so it may use other slopes than in training.
        if self.bias_max == _USUAL_BIAS_MAX:
            return ()
        return (
            f'config.json contains alibi_bias_max "{self.bias_max:g}", which transformers ignores: it uses the '
            f"slopes of {_USUAL_BIAS_MAX}, which the method changes.",
        )


def read_alibi(config: Config, family: Family, original_length: int | None = None) -> Alibi:
    """Read the number of slopes and the context length."""
    length, heads = (_size(config, family, key) for key in ("max_position_embeddings", "num_attention_heads"))
    attention = text_config(config, family).get("attn_config")
    declared = attention.get("alibi_bias_max") if isinstance(attention, Mapping) else None
    bias_max = float(declared) if isinstance(declared, int | float) else _USUAL_BIAS_MAX
    trained = original_length or provenance(config).get("trained_length") or length
    return Alibi(int(trained), length, heads, bias_max, stops=family.model_type == "mpt")


@dataclass(frozen=True)
class Buckets(Encoding):
    """Learned biases, one for each bucket of distances and each head.

    Attributes:
        distance: The distance in tokens from which all share the last bucket.
        num_buckets: The number of buckets; an encoder has half of them for each side.
    """

    distance: int
    num_buckets: int

    @property
    def feature(self) -> str:
        """The feature that engines must support: buckets of distances."""
        return "buckets"

    @override
    def describe(self) -> str:
        return (
            f"buckets of relative biases, as in T5: distances of {self.distance} or more tokens share the last of "
            f"{self.num_buckets} buckets, so no distance is out of range"
        )

    @override
    def to_record(self) -> dict[str, Any]:
        return {**super().to_record(), "source_distance": self.distance}

    @override
    def restore_source(self, record: Mapping[str, Any]) -> Self:
        length, distance = record.get("source_length"), record.get("source_distance")
        plain = self.at_length(int(length or self.trained_length))
        return dataclasses.replace(plain, distance=int(distance or self.distance))

    @override
    def state_length(self, text: Config, family: Family) -> None:
        # transformers ignores the length and uses the distance.
        super().state_length(text, family)
        text[_DISTANCE] = self.distance


_DISTANCE, _NUM_BUCKETS = "relative_attention_max_distance", "relative_attention_num_buckets"


def read_buckets(config: Config, family: Family, original_length: int | None = None) -> Buckets:
    """Read the buckets and the context length."""
    length, distance, count = (
        _size(config, family, key) for key in ("max_position_embeddings", _DISTANCE, _NUM_BUCKETS)
    )
    trained = original_length or provenance(config).get("trained_length") or length
    return Buckets(int(trained), length, distance, count)


def alibi_slopes(num_heads: int) -> list[float]:
    """Return the slopes of the heads in their order.

    They are 2^(−8h/H) for powers of two. Otherwise they are those of the next smaller power, then every other one of
    the next larger. ALiBi (2108.12409), section 3 and its code.
    """
    power = 1 << (num_heads.bit_length() - 1)
    slopes = [2 ** (-8 * (head + 1) / power) for head in range(power)]
    return slopes + [2 ** (-8 * (2 * extra + 1) / (2 * power)) for extra in range(num_heads - power)]


def _size(config: Config, family: Family, key: str) -> int:
    """Read a positive whole number from config.json."""
    value = read(config, family, key)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MOST:
        raise CtxextError(f'config.json has no usable {family.aliases.get(key, key)}: "{value}".')
    return value
