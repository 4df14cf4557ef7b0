"""NTK-aware scaling, static."""

from dataclasses import dataclass

from ctxext.recipes.base import Scaling
from ctxext.recipes.encodings.rotary import Rotary


@dataclass(frozen=True, kw_only=True)
class Ntk(Scaling):
    """Raise the base so that the slowest frequency is interpolated and the fastest is kept. Every engine runs it.

    b becomes b · s^(d / (d - 2)). bloc97, "NTK-aware scaled RoPE", June 2023; Peng et al. 2023, section 3.1.
    """

    name = "ntk"
    title = "NTK-aware scaling"
    paper = "https://arxiv.org/abs/2309.00071"

    def theta_after(self, rotary: Rotary) -> float:
        """The raised base."""
        return float(rotary.theta * self.stretch ** (rotary.span / (rotary.dim - 2)))
