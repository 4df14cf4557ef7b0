"""LongRoPE: one factor per dimension."""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Self

from typing_extensions import override

from ctxext.errors import CtxextError
from ctxext.recipes.base import Scaling
from ctxext.recipes.encodings.base import Encoding
from ctxext.recipes.encodings.frequencies import inverse_frequencies
from ctxext.recipes.encodings.rotary import Rotary
from ctxext.recipes.param import SearchRange, param

_KNOTS = 8
_MAX_RISE = 3.0
_MOST = 1.25
"""The largest divisor, in multiples of the factor: the search space of section 3.2."""


def with_attention_factor(value: float) -> dict[str, float]:
    """Return the keys that specify a factor on cos and sin.

    transformers reads the first, vLLM and SGLang the other two. vLLM and SGLang otherwise take
    sqrt(1 + ln(factor) / ln(original context length)) (docs/traps.md, trap 27).
    """
    return {"attention_factor": value, "short_mscale": value, "long_mscale": value}


def _num_knots(rotary: Rotary) -> int:
    """Return the number of knots.

    There are at least two, as no model rotates fewer than two pairs (`geometry.check_sizes`).
    """
    return min(_KNOTS, rotary.dim // 2)


def _starts(rotary: Rotary, factor: float) -> list[float]:
    """Compute the rise of YaRN's curve up to each knot; 1 is an even share of the way to the factor."""
    yarn = {"rope_type": "yarn", "factor": factor}
    plain, slowed = (
        inverse_frequencies(dataclasses.replace(rotary, parameters=parameters))
        for parameters in ({"rope_type": "default"}, yarn)
    )
    curve = [math.log(old / new) / math.log(factor) for old, new in zip(plain, slowed, strict=True)]
    count = _num_knots(rotary)
    heights = [_interpolate(curve, knot / (count - 1)) for knot in range(count)]
    rises = [count * (after - before) for before, after in itertools.pairwise(heights)]
    return [0.0, *(min(max(rise, 0.0), _MAX_RISE) for rise in rises)]  # YaRN keeps the fastest pair.


def _interpolate(knots: Sequence[float], place: float) -> float:
    """Interpolate linearly between evenly spaced knots, at least two, at a place from 0 to 1."""
    at = place * (len(knots) - 1)
    left = min(int(at), len(knots) - 2)
    return knots[left] + (knots[left + 1] - knots[left]) * (at - left)


def _num_pairs(encoding: Encoding) -> int:
    assert isinstance(encoding, Rotary)
    return encoding.dim // 2


class LongRope(Scaling):
    """Divide each RoPE frequency by a separate divisor, usually found by search. Short and long inputs have two lists.

    θ_i becomes θ_i / λ_i. Use it with a list from ctxext search, a published model or a formula. Ding et al. 2024,
    section 3; LongRoPE2, arXiv 2502.20082.
    """

    name = "longrope"
    title = "LongRoPE"
    paper = "https://arxiv.org/abs/2402.13753"
    rope_type = "longrope"
    is_published = False
    caution = (
        "transformers selects the list by the longest sequence of the batch and switches while decoding: "
        "with two different lists, cached decoding across the original context length differs from uncached decoding."
    )

    long_factor: tuple[float, ...] = param(
        help="File with a list of divisors for inputs beyond the original context, one per rotated pair."
    )
    short_factor: tuple[float, ...] | None = param(
        None, help="File with a list of divisors within the original context. Default: all 1."
    )
    attention_factor: float | None = param(
        None,
        help="Temperature: factor on cos and sin. Default: sqrt(1 + ln(factor) / ln(original length)).",
        min=0.01,
        search=(1.0, 1.6),
    )

    @classmethod
    @override
    def neutral_step(cls, encoding: Encoding) -> Self:
        return cls(**cls.neutral, long_factor=(1.0,) * _num_pairs(encoding))

    @classmethod
    @override
    def example_step(cls, encoding: Encoding) -> Self:
        return cls(**cls.example, long_factor=tuple(1.0 + pair for pair in range(_num_pairs(encoding))))

    @classmethod
    @override
    def search_space(cls, rotary: Rotary, factor: float) -> dict[str, SearchRange]:
        # The curve of divisors is given by its rises between a few knots. No rise is negative, so divisors never fall
        # from one dimension to the next: the paper's constraint (section 3.2). The search starts from YaRN's curve, as
        # the paper's search does among others.
        rises = {
            f"rise_{knot}": SearchRange((0.0, _MAX_RISE), start) for knot, start in enumerate(_starts(rotary, factor))
        }
        attention = super().search_space(rotary, factor)["attention_factor"]
        return {"short": SearchRange(("ones", "long"), "ones"), "attention_factor": attention, **rises}

    @classmethod
    @override
    def from_search(cls, numbers: Mapping[str, Any], rotary: Rotary, factor: float) -> Self:
        # Between knots, the logarithm of the divisors is linear.
        count, pairs = _num_knots(rotary), rotary.dim // 2
        most, level, knots = math.log(_MOST * factor), 0.0, []
        for knot in range(count):
            level = min(level + numbers[f"rise_{knot}"] * math.log(factor) / count, most)
            knots.append(level)
        long = tuple(float(f"{math.exp(_interpolate(knots, pair / (pairs - 1))):.4g}") for pair in range(pairs))
        return cls(
            factor=factor,
            long_factor=long,
            short_factor=long if numbers["short"] == "long" else None,
            attention_factor=numbers.get("attention_factor"),
        )

    @override
    def schedule(self, rotary: Rotary) -> Mapping[str, Any]:
        num_factors = rotary.dim // 2
        short_factor = self.short_factor or (1.0,) * num_factors
        for name, factors in (("long_factor", self.long_factor), ("short_factor", short_factor)):
            if len(factors) != num_factors:
                raise CtxextError(
                    f"longrope: {name} has {len(factors)} numbers, but this model rotates {num_factors} pairs."
                )
            if min(factors) <= 0:
                raise CtxextError(f'longrope: {name} must be above zero, not "{min(factors):g}".')
        attention = self.attention_factor
        if attention is None and self.target_length is not None and self.scaling_factor > 1:
            # transformers 4 derives the factor from the two lengths, so the temperature is written explicitly.
            attention = math.sqrt(1 + math.log(self.scaling_factor) / math.log(rotary.trained_length))
        extra = {} if attention is None else with_attention_factor(attention)
        return {
            "factor": self.scaling_factor,
            "original_max_position_embeddings": rotary.trained_length,
            "short_factor": list(short_factor),
            "long_factor": list(self.long_factor),
            **extra,
        }
