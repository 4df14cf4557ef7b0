"""Resonance RoPE: wavelengths rounded to whole tokens, stored as LongRoPE's lists."""

import math

from ctxext.recipes.encodings.frequencies import inverse_frequencies
from ctxext.recipes.encodings.rotary import Rotary
from ctxext.recipes.methods.divided import Divided
from ctxext.recipes.methods.ntk_by_parts import check_ends
from ctxext.recipes.param import param


class Resonance(Divided):
    """Round YaRN's wavelengths to a whole number of tokens, so that phases repeat exactly. No training.

    A variant of yarn for comparisons. Wang et al. 2024, section 4.
    """

    name = "resonance"
    title = "Resonance RoPE on YaRN"
    paper = "https://arxiv.org/abs/2403.00071"
    is_experimental = True

    # transformers reads an end of YaRN's ramp of 0 as a missing one.
    beta_fast: float = param(
        32.0,
        help="Dimensions with more rotations than this within the original context stay unchanged.",
        min=0.01,
    )
    beta_slow: float = param(
        1.0, help="Dimensions with fewer rotations than this are divided by the whole factor.", min=0.01
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ends(self.name, self.beta_fast, self.beta_slow)

    def divisors(self, rotary: Rotary) -> list[float]:
        """Return the divisor of each rotated pair's frequency.

        It turns the model's own wavelength into YaRN's rounded one.
        """
        plain = inverse_frequencies(rotary.with_parameters({"rope_type": "default"}))
        if self.scaling_factor == 1:
            return [1.0] * len(plain)
        ramp = {"factor": self.scaling_factor, "beta_fast": self.beta_fast, "beta_slow": self.beta_slow}
        slowed = inverse_frequencies(rotary.with_parameters({"rope_type": "yarn", **ramp}))
        return [old * round(2 * math.pi / new) / (2 * math.pi) for old, new in zip(plain, slowed, strict=True)]
