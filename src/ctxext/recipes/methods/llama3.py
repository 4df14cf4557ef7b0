"""Llama 3.1's scaling by wavelength."""

from collections.abc import Mapping
from typing import Any

from typing_extensions import override

from ctxext.errors import CtxextError
from ctxext.recipes.base import Scaling
from ctxext.recipes.encodings.rotary import Rotary
from ctxext.recipes.model_config import ModelConfig
from ctxext.recipes.param import param


class Llama3(Scaling):
    """Divide slow RoPE frequencies by the factor, keep fast ones, blend in between, as Llama 3.1 does.

    Frequencies with a wavelength above L / low_freq_factor are divided by s, those below L / high_freq_factor are kept.
    Use it for Llama 3 (preset llama-3.1-128k), or instead of yarn if attention must keep its scale. "The Llama 3 Herd
    of Models", section 3.4.2.
    """

    name = "llama3"
    title = "Llama 3 scaling"
    paper = "https://arxiv.org/abs/2407.21783"
    rope_type = "llama3"

    low_freq_factor: float = param(
        1.0,
        help="Dimensions with fewer rotations than this within the original context are divided by the factor.",
        min=0.01,
        search=(0.5, 2),
    )
    high_freq_factor: float = param(
        4.0,
        help="Dimensions with more rotations than this stay unchanged.",
        min=0.01,
        search=(3, 32),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.high_freq_factor <= self.low_freq_factor:
            raise CtxextError(
                f'llama3: high_freq_factor "{self.high_freq_factor:g}" must be above '
                f'low_freq_factor "{self.low_freq_factor:g}".'
            )

    @override
    def edit(self, model: ModelConfig) -> ModelConfig:
        # Factor 1 keeps the plain schedule, because blending a frequency with itself changes its last bit.
        if self.resolve(model.rotary).scaling_factor == 1 and not model.rotary.is_scaled:
            return model.with_encoding(model.rotary)
        return super().edit(model)

    @override
    def schedule(self, rotary: Rotary) -> Mapping[str, Any]:
        return {
            "factor": self.scaling_factor,
            "low_freq_factor": self.low_freq_factor,
            "high_freq_factor": self.high_freq_factor,
            "original_max_position_embeddings": rotary.trained_length,
        }
