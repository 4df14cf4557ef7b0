"""YaRN: NTK by parts with an attention temperature."""

from collections.abc import Mapping
from typing import Any

from ctxext.recipes.encodings.rotary import Rotary
from ctxext.recipes.methods.ntk_by_parts import NtkByParts
from ctxext.recipes.param import param


class Yarn(NtkByParts):
    """Blend interpolated and original RoPE frequencies and sharpen attention. Works untrained, best after a fine-tune.

    ntk-by-parts with cos and sin multiplied by the temperature 0.1 · ln(s) + 1. The first choice for RoPE models: most
    engines run it without custom code, but short inputs lose a little. Peng et al. 2023, sections 3.2 to 3.4.
    """

    name = "yarn"
    title = "YaRN"

    attention_factor: float | None = param(
        None, help="Temperature: factor on cos and sin. Default: 0.1 · ln(factor) + 1.", min=0.01, search=(1.0, 1.6)
    )
    mscale: float | None = param(
        None, help="DeepSeek's weight of ln(factor) in the temperature; with --mscale-all-dim.", min=0
    )
    mscale_all_dim: float | None = param(
        None, help="DeepSeek's weight of ln(factor) in its softmax scale; divides the temperature.", min=0
    )

    def schedule(self, rotary: Rotary) -> Mapping[str, Any]:
        """Return the schedule's parameters as transformers names them.

        The rope type is `yarn`, without a default temperature, as some engines ignore it (docs/traps.md, trap 7).
        """
        names = ("attention_factor", "mscale", "mscale_all_dim")
        extra = {name: value for name in names if (value := getattr(self, name)) is not None}
        return {**self.ramp(rotary), **extra}
