"""YaRN, and NTK-by-parts: the same ramp without an attention temperature."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

from typing_extensions import override

from ctxext.errors import CtxextError
from ctxext.recipes.base import Scaling
from ctxext.recipes.encodings.base import Encoding
from ctxext.recipes.encodings.rotary import Rotary
from ctxext.recipes.param import param

_BETA_FAST, _BETA_SLOW = 32.0, 1.0


def check_ends(name: str, fast: float, slow: float) -> None:
    """Check the order of the ends of a ramp."""
    # Kimi K2 has both at 1: a step from one dimension to the next.
    if fast < slow:
        raise CtxextError(f'{name}: beta_fast "{fast:g}" must not be below beta_slow "{slow:g}".')


class NtkByParts(Scaling):
    """Divide slow RoPE frequencies by the factor, keep fast ones, blend in between: YaRN without its temperature.

    A linear ramp leads from θ_i (more than β_fast rotations within the original context) to θ_i / s (fewer than
    β_slow). Use it if attention must keep its scale; otherwise prefer yarn. Peng et al. 2023, section 3.2.
    """

    name = "ntk-by-parts"
    title = "NTK-by-parts"
    paper = "https://arxiv.org/abs/2309.00071"
    rope_type = "yarn"

    # transformers reads an end of 0 as a missing one.
    beta_fast: float | None = param(
        None,
        help="Dimensions with more rotations than this within the original context stay unchanged.",
        min=0.01,
        search=(8, 64),
        usual=_BETA_FAST,
    )
    beta_slow: float | None = param(
        None,
        help="Dimensions with fewer rotations than this are divided by the whole factor.",
        min=0.01,
        search=(0.5, 4),
        usual=_BETA_SLOW,
    )
    truncate: bool | None = param(
        None, help="Round the ends of the ramp outwards to whole dimensions (gpt-oss does not).", usual=True
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ends(self.name, *self._ends)

    @property
    def _ends(self) -> tuple[float, float]:
        fast = _BETA_FAST if self.beta_fast is None else self.beta_fast
        return fast, _BETA_SLOW if self.beta_slow is None else self.beta_slow

    @override
    def resolve(self, encoding: Encoding) -> Self:
        fast, slow = self._ends
        return dataclasses.replace(super().resolve(encoding), beta_fast=fast, beta_slow=slow)

    @override
    def schedule(self, rotary: Rotary) -> Mapping[str, Any]:
        # The rope type is `yarn`, and its temperature must be 1 in all engines. mlx-lm does not read attention_factor
        # but computes 1 from mscale 0 (docs/traps.md, trap 27). SGLang reads mscale only next to `mscale_all_dim`,
        # which scales all scores of DeepSeek's family unless it is zero.
        return {**self.ramp(rotary), "attention_factor": 1.0, "mscale": 0.0, "mscale_all_dim": 0.0}

    def ramp(self, rotary: Rotary) -> Mapping[str, Any]:
        """Return the parameters of the ramp.

        The original length is written out because the maximum has changed (docs/traps.md, trap 3).
        """
        fast, slow = self._ends
        return {
            "factor": self.scaling_factor,
            "original_max_position_embeddings": rotary.trained_length,
            "beta_fast": fast,
            "beta_slow": slow,
            **({} if self.truncate is None else {"truncate": self.truncate}),
        }
