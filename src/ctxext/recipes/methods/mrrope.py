"""MrRoPE: divisors by mixed-radix interpolation, stored as LongRoPE's lists."""

import math

from typing_extensions import override

from ctxext.recipes.encodings.rotary import Rotary
from ctxext.recipes.methods.divided import Divided
from ctxext.recipes.methods.ntk_by_parts import check_ends
from ctxext.recipes.param import param


class MrRope(Divided):
    """Raise the divisor step by step from fast to slow RoPE frequencies (mixed-radix interpolation). No training.

    At step t of n, frequencies are divided by s^(t(t + 1) / (n(n + 1))), or by s^(t / n) with --variant uni. cos and
    sin are multiplied by 0.1 · ln(s) + 1. "MrRoPE", ICLR 2026, equations 13 to 26.
    """

    name = "mrrope"
    title = "MrRoPE"
    paper = "https://arxiv.org/abs/2601.22181"

    variant: str = param(
        "pro",
        help="Growth of the divisors: accelerating (pro), or by equal steps (uni).",
        choices=("pro", "uni"),
        search=("pro", "uni"),
    )
    beta_fast: float = param(
        32.0, help="Dimensions with more rotations than this within the original context stay unchanged.", min=0.01
    )
    beta_slow: float = param(
        1.0, help="Dimensions with fewer rotations than this are divided by the whole factor.", min=0.01
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ends(self.name, self.beta_fast, self.beta_slow)

    @override
    def divisors(self, rotary: Rotary) -> list[float]:
        # The ramp begins and ends at whole indices.
        pairs = rotary.dim // 2
        rotations = [
            rotary.theta ** (-2 * i / rotary.span) * rotary.trained_length / (2 * math.pi) for i in range(pairs)
        ]
        last_fast = max((i for i in range(pairs) if rotations[i] > self.beta_fast), default=-1)
        first_slow = next((i for i in range(pairs) if rotations[i] < self.beta_slow), pairs)
        steps = first_slow - last_fast
        divisors = []
        for i in range(pairs):
            t = min(max(i - last_fast, 0), steps)
            done = t * (t + 1) / (steps * (steps + 1)) if self.variant == "pro" else t / steps
            divisors.append(float(self.scaling_factor**done))
        return divisors
