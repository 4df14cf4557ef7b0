"""LongRoPE: one factor per dimension."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ctxext.errors import CtxextError
from ctxext.recipes.base import Scaling
from ctxext.recipes.param import param
from ctxext.recipes.rotary import Rotary


@dataclass(frozen=True, kw_only=True)
class LongRope(Scaling):
    """Divide every frequency by a factor of its own, found by search; one list inside the old window, one beyond.

    θ_i becomes θ_i / λ̂_i. Ding et al. 2024, section 3; LongRoPE2, arXiv 2502.20082.
    """

    name = "longrope"
    title = "LongRoPE"
    paper = "https://arxiv.org/abs/2402.13753"
    rope_type = "longrope"
    caution = (
        "transformers picks the list by the whole batch's longest row and switches while decoding: "
        "with two different lists, cached decoding across the trained length differs from the uncached forward."
    )

    long_factor: tuple[float, ...] = param(
        help="One divisor per rotated pair of dimensions beyond the trained length: a file with a list of numbers."
    )
    short_factor: tuple[float, ...] | None = param(
        None, help="The same inside the trained length; ones where not given."
    )
    attention_factor: float | None = param(
        None, help="Multiplier of cos and sin, instead of sqrt(1 + ln(factor) / ln(trained length)).", min=0.01
    )

    def schedule(self, rotary: Rotary) -> Mapping[str, Any]:
        """The `longrope` type of transformers.

        Raises:
            CtxextError: a list has the wrong length or a factor below zero.
        """
        num_factors = rotary.dim // 2
        short = self.short_factor or (1.0,) * num_factors
        for name, factors in (("long_factor", self.long_factor), ("short_factor", short)):
            if len(factors) != num_factors:
                raise CtxextError(
                    f"longrope: {name} has {len(factors)} numbers, but this model rotates {num_factors} pairs."
                )
            if min(factors) <= 0:
                raise CtxextError(f'longrope: {name} must be above zero, not "{min(factors):g}".')
        extra = {} if self.attention_factor is None else {"attention_factor": self.attention_factor}
        return {
            "factor": self.stretch,
            "original_max_position_embeddings": rotary.trained_length,
            "short_factor": list(short),
            "long_factor": list(self.long_factor),
            **extra,
        }
