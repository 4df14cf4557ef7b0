"""YaRN: NTK by parts with an attention temperature."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

from typing_extensions import override

from ctxext.recipes.encodings.rotary import Rotary
from ctxext.recipes.methods.ntk_by_parts import NtkByParts
from ctxext.recipes.model_config import ModelConfig
from ctxext.recipes.param import param


class Yarn(NtkByParts):
    """Blend interpolated and original RoPE frequencies and sharpen attention. Works untrained, best after a fine-tune.

    ntk-by-parts with cos and sin multiplied by the temperature 0.1 · ln(s) + 1. The first choice for RoPE models: most
    engines run it without custom code, but short inputs lose a little. Peng et al. 2023, sections 3.2 to 3.4.

    Latent attention rotates only some dimensions of each head. If the model's code can scale the whole score
    (GLM-4.7-Flash, GLM-5, LongCat), mscale and mscale_all_dim are 1 by default, as in DeepSeek-V3's configuration: cos
    and sin keep their scale, and all scores are multiplied by the square of the temperature. On three tiny models (2
    layers, trained on 128 tokens, factor 4) this changed the loss by -0.03 to 0.01 nats at 128 tokens and by 0.03 to
    0.11 at 512.
    """

    name = "yarn"
    title = "YaRN"

    attention_factor: float | None = param(
        None, help="Temperature: factor on cos and sin. Default: 0.1 · ln(factor) + 1.", min=0.01, search=(1.0, 1.6)
    )
    mscale: float | None = param(
        None, help="DeepSeek's weight of ln(factor) in the temperature; requires --mscale-all-dim.", min=0
    )
    mscale_all_dim: float | None = param(
        None, help="DeepSeek's weight of ln(factor) in its scale of all scores; divides the temperature.", min=0
    )

    @override
    def adapt(self, model: ModelConfig) -> Self:
        # With latent attention, the temperature applies to the whole score.
        is_set = any(value is not None for value in (self.attention_factor, self.mscale, self.mscale_all_dim))
        if is_set or not model.family.scales_scores:
            return self
        return dataclasses.replace(self, mscale=1.0, mscale_all_dim=1.0)

    @override
    def schedule(self, rotary: Rotary) -> Mapping[str, Any]:
        # The default temperature is not written, because some engines ignore attention_factor (docs/traps.md, trap 7).
        names = ("attention_factor", "mscale", "mscale_all_dim")
        extra = {name: value for name in names if (value := getattr(self, name)) is not None}
        return {**self.ramp(rotary), **extra}
