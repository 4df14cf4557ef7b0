"""Position Interpolation."""

from collections.abc import Mapping
from typing import Any

from typing_extensions import override

from ctxext.recipes.base import Scaling
from ctxext.recipes.encodings.rotary import Rotary


class PositionInterpolation(Scaling):
    """Divide every RoPE frequency by the factor. The simplest method; it needs a fine-tune to be useful.

    θ_i becomes θ_i / s. Use it with a fine-tune, or as a baseline. Chen et al. 2023, section 2.3; also kaiokendev, June
    2023.
    """

    name = "pi"
    title = "Position Interpolation"
    aliases = ("linear",)
    paper = "https://arxiv.org/abs/2306.15595"
    rope_type = "linear"

    @override
    def schedule(self, rotary: Rotary) -> Mapping[str, Any]:
        return {"factor": self.scaling_factor}
