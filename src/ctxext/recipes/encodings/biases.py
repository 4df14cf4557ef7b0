"""Position encodings as biases on scores: ALiBi's fall with the distance, those of buckets of distances are learned."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from typing_extensions import override

from ctxext.checkpoint.families import Family, read, text_config
from ctxext.errors import CtxextError
from ctxext.recipes.encodings.base import POSITIONS, Config, Encoding, provenance

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


@dataclass(frozen=True, kw_only=True)
class BucketLayout:
    """A family's buckets of distances.

    Attributes:
        formula: The rule that gives a distance its bucket, a name in verify/references/encodings.py.
        distance_key: The key of the distance from which all share the last bucket.
        count_key: The key of the number of buckets.
        sides: The number of sides that have so many buckets each; 1 if the sides of an encoder share them.
        tensors: The suffix of the name of a table of vectors; none if the weights have a scalar for each head.
    """

    formula: str
    distance_key: str
    count_key: str
    sides: int = 1
    tensors: tuple[str, ...] = ()


_T5 = BucketLayout(
    formula="t5", distance_key="relative_attention_max_distance", count_key="relative_attention_num_buckets"
)
BUCKET_LAYOUTS: Mapping[str, BucketLayout] = {
    **dict.fromkeys(("longt5", "mt5", "switch_transformers", "t5", "umt5"), _T5),
    "deberta-v2": BucketLayout(
        formula="deberta",
        distance_key="max_relative_positions",
        count_key="position_buckets",
        sides=2,
        tensors=("encoder.rel_embeddings.weight",),
    ),
}
"""The families with buckets of distances, by model type."""


@dataclass(frozen=True)
class Buckets(Encoding):
    """Learned biases or embeddings, one for each bucket of distances.

    Attributes:
        layout: Its keys in config.json, and its formula.
        distance: The distance in tokens from which all share the last bucket.
        num_buckets: The number of buckets of both sides; an encoder has half of them for each side.
    """

    layout: BucketLayout
    distance: int
    num_buckets: int

    @property
    def feature(self) -> str:
        """The feature that engines must support: buckets of distances."""
        return "buckets"

    @override
    def describe(self) -> str:
        return (
            f"{POSITIONS['buckets']}: distances of {self.distance} or more tokens share the last of "
            f"{self.num_buckets} buckets, so no distance is out of range"
        )

    @property
    def first_index(self) -> None:
        """None: distances are those between tokens of the input."""

    @property
    def num_exact(self) -> int:
        """The number of distances on each side of an encoder that have a bucket to themselves."""
        return self.num_buckets // 4

    @property
    def flaw(self) -> str:
        """The reason why DeBERTa's formula gives far distances no bucket: a logarithm of at most 0; empty if none."""
        if self.layout.formula != "deberta" or 1 <= self.num_exact < self.distance - 1:
            return ""
        keys = f'"{self.layout.distance_key}" is {self.distance} and "{self.layout.count_key}" {self.num_buckets // 2}'
        return f"{keys}, which leaves no far distances for the logarithmic half of the buckets"

    @property
    def learned_tensors(self) -> tuple[str, ...]:
        """Name suffix of the table of vectors; scalars of each head are not trained by an adapter."""
        return self.layout.tensors

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
        text[self.layout.distance_key] = self.distance


def read_buckets(config: Config, family: Family, original_length: int | None = None) -> Buckets:
    """Read the buckets and the context length."""
    layout = BUCKET_LAYOUTS[family.model_type]
    length, count = (_size(config, family, key) for key in ("max_position_embeddings", layout.count_key))
    distance = read_distance(config, family, layout.distance_key)
    trained = original_length or provenance(config).get("trained_length") or length
    return Buckets(int(trained), length, layout, distance, layout.sides * count)


def read_distance(config: Config, family: Family, key: str) -> int:
    """Read the largest distance in tokens; DeBERTa's classes replace -1 by the context length."""
    value = read(config, family, key)
    is_length = key == "max_relative_positions" and isinstance(value, int) and value < 1
    return _size(config, family, "max_position_embeddings" if is_length else key)


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
