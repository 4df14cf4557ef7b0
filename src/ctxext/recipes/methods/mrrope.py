"""MrRoPE: divisors by mixed-radix interpolation, carried as LongRoPE's lists."""

import math
from dataclasses import dataclass

from ctxext.recipes.encodings.rotary import Rotary
from ctxext.recipes.methods.divided import Divided
from ctxext.recipes.methods.ntk_by_parts import check_ends
from ctxext.recipes.param import param


@dataclass(frozen=True, kw_only=True)
class MrRope(Divided):
    """Raise the divisor step by step between the dimensions that rotate often and those that never do. No training.

    With t steps of n done, frequencies are divided by s^(t(t + 1) / (n(n + 1))), or with --variant uni by s^(t / n);
    cos and sin are multiplied by 0.1 · ln(s) + 1. "MrRoPE", ICLR 2026, equations 13 to 26.
    """

    name = "mrrope"
    title = "MrRoPE"
    paper = "https://arxiv.org/abs/2601.22181"

    variant: str = param(
        "pro", help="Divisors that rise ever faster, or by equal steps.", choices=("pro", "uni"), search=("pro", "uni")
    )
    beta_fast: float = param(
        32.0, help="Rotations within the original length above which a dimension is left as it was.", min=0
    )
    beta_slow: float = param(1.0, help="Rotations below which a dimension is divided by the whole factor.", min=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ends(self.name, self.beta_fast, self.beta_slow)

    def divisors(self, rotary: Rotary) -> list[float]:
        """s^e of each pair; the bounds are indices."""
        pairs = rotary.dim // 2
        rotations = [
            rotary.theta ** (-2 * i / rotary.span) * rotary.trained_length / (2 * math.pi) for i in range(pairs)
        ]
        last_fast = max((i for i in range(pairs) if rotations[i] > self.beta_fast), default=-1)
        first_slow = next((i for i in range(pairs) if rotations[i] < self.beta_slow), pairs)
        steps = first_slow - last_fast
        found = []
        for i in range(pairs):
            t = min(max(i - last_fast, 0), steps)
            done = t * (t + 1) / (steps * (steps + 1)) if self.variant == "pro" else t / steps
            found.append(float(self.stretch**done))
        return found
