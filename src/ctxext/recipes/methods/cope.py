"""CoPE: low frequencies tapered off, stored as LongRoPE's lists."""

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from ctxext.recipes.encodings.rotary import Rotary
from ctxext.recipes.methods.divided import Divided
from ctxext.recipes.param import param

_STILL = 1e6
"""The divisor for frequencies that no longer rotate: a list cannot contain infinity."""


class Cope(Divided):
    """Fade the slowest RoPE frequencies out along a cosine, on top of a raised base. Meant to be trained with.

    The last c frequencies are multiplied by (1 + cos(π · (i - i0) / (c - 1))) / 2, so the slowest stops rotating.
    "CoPE", arXiv 2602.05258, section 3.
    """

    name = "cope"
    title = "CoPE"
    paper = "https://arxiv.org/abs/2602.05258"
    is_experimental = True
    neutral: ClassVar[Mapping[str, Any]] = {"factor": 1, "num_faded": 0}
    caution = "it needs training: fine-tune the model before use."

    theta: float | None = param(None, help="The new RoPE base (rope_theta). Default: the model's.", min=1.0)
    num_faded: int | None = param(
        None,
        help="Number of slowest pairs that fade (c). Default: three quarters of those that never complete a rotation.",
        min=0,
    )

    def theta_after(self, rotary: Rotary) -> float:
        """Return the RoPE base after scaling.

        It is the chosen one, or the model's by default.
        """
        return self.theta or rotary.theta

    def attention_factor(self) -> float:
        """Return the factor on cos and sin.

        It is 1, as CoPE has no temperature.
        """
        return 1.0

    def divisors(self, rotary: Rotary) -> list[float]:
        """Return the divisor of each rotated pair's frequency.

        It is the inverse of the fading; the last divisor is very large.
        """
        pairs, base = rotary.dim // 2, self.theta_after(rotary)
        never = sum(2 * math.pi * base ** (2 * i / rotary.span) > rotary.trained_length for i in range(pairs))
        count = min(round(0.75 * never) if self.num_faded is None else self.num_faded, pairs)
        divisors = [1.0] * pairs
        for step in range(count):
            share = (1 + math.cos(math.pi * step / max(count - 1, 1))) / 2
            divisors[pairs - count + step] = 1 / max(share, 1 / _STILL)
        return divisors
