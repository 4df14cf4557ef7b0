"""YaRN, and the same ramp without its temperature: NTK-by-parts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ctxext.errors import CtxextError
from ctxext.recipes.base import Scaling
from ctxext.recipes.param import param
from ctxext.recipes.rotary import Rotary


@dataclass(frozen=True, kw_only=True)
class NtkByParts(Scaling):
    """Interpolate only the dimensions that never complete a rotation in the original context, and keep the fast ones.

    A linear ramp between θ_i (more than β_fast rotations in the original context) and θ_i / s (fewer than β_slow).
    Peng et al. 2023, section 3.2; transformers clamps the ramp's ends at d - 1.
    """

    name = "ntk-by-parts"
    title = "NTK-by-parts"
    paper = "https://arxiv.org/abs/2309.00071"
    rope_type = "yarn"

    beta_fast: float = param(
        32.0,
        help="Rotations within the original context length above which a dimension is left as it was.",
        min=0,
        search=(8, 64),
    )
    beta_slow: float = param(
        1.0,
        help="Rotations within the original context length below which a dimension is fully interpolated.",
        min=0,
        search=(0.5, 4),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.beta_fast <= self.beta_slow:
            raise CtxextError(
                f'{self.name}: beta_fast "{self.beta_fast:g}" must be above beta_slow "{self.beta_slow:g}".'
            )

    def schedule(self, rotary: Rotary) -> Mapping[str, Any]:
        """The `yarn` type of transformers with its temperature switched off."""
        return {**self.ramp(rotary), "attention_factor": 1.0}

    def ramp(self, rotary: Rotary) -> Mapping[str, Any]:
        """The ramp; the original length is written out because the maximum has moved (docs/traps.md, trap 3)."""
        return {
            "factor": self.stretch,
            "original_max_position_embeddings": rotary.trained_length,
            "beta_fast": self.beta_fast,
            "beta_slow": self.beta_slow,
        }


@dataclass(frozen=True, kw_only=True)
class Yarn(NtkByParts):
    """Blend interpolated and original frequencies and sharpen attention. Useful untrained, best after a fine-tune.

    NTK-by-parts, with cos and sin multiplied by 0.1 · ln(s) + 1. Peng et al. 2023, sections 3.2 to 3.4.
    """

    name = "yarn"
    title = "YaRN"

    attention_factor: float | None = param(
        None, help="Multiplier of cos and sin, instead of YaRN's 0.1 · ln(factor) + 1.", min=0.01, search=(1.0, 1.6)
    )

    def schedule(self, rotary: Rotary) -> Mapping[str, Any]:
        """The `yarn` type; the default temperature is left out, as some engines ignore it (docs/traps.md, trap 7)."""
        extra = {} if self.attention_factor is None else {"attention_factor": self.attention_factor}
        return {**self.ramp(rotary), **extra}
