"""YaRN: NTK by parts with a temperature."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ctxext.recipes.encodings.rotary import Rotary
from ctxext.recipes.methods.ntk_by_parts import NtkByParts
from ctxext.recipes.param import param


@dataclass(frozen=True, kw_only=True)
class Yarn(NtkByParts):
    """Blend interpolated and original frequencies and sharpen attention. Useful untrained, best after a fine-tune.

    NTK-by-parts, with cos and sin multiplied by 0.1 · ln(s) + 1. Peng et al. 2023, sections 3.2 to 3.4. With DeepSeek's
    two numbers, which their attention reads too, by (0.1 · mscale · ln(s) + 1) / (0.1 · mscale_all_dim · ln(s) + 1).
    """

    name = "yarn"
    title = "YaRN"

    attention_factor: float | None = param(
        None, help="Multiplier of cos and sin, instead of YaRN's 0.1 · ln(factor) + 1.", min=0.01, search=(1.0, 1.6)
    )
    mscale: float | None = param(
        None, help="DeepSeek's weight of ln(factor) for cos and sin; with --mscale-all-dim.", min=0
    )
    mscale_all_dim: float | None = param(
        None, help="DeepSeek's weight of ln(factor) for all dimensions of a head.", min=0
    )

    def schedule(self, rotary: Rotary) -> Mapping[str, Any]:
        """The `yarn` type; the default temperature is left out, as some engines ignore it (docs/traps.md, trap 7)."""
        names = ("attention_factor", "mscale", "mscale_all_dim")
        extra = {name: value for name in names if (value := getattr(self, name)) is not None}
        return {**self.ramp(rotary), **extra}
