"""Adjusted base frequency."""

from dataclasses import dataclass

from ctxext.recipes.base import Scaling
from ctxext.recipes.param import param
from ctxext.recipes.rotary import Rotary


@dataclass(frozen=True, kw_only=True)
class AdjustedBase(Scaling):
    """Set the base to a number you choose. Meant to be followed by training on long texts.

    b becomes --theta. Xiong et al. 2023, section 4.1 (500000 for Llama 2 at 32k).
    """

    name = "abf"
    title = "Adjusted base frequency"
    paper = "https://arxiv.org/abs/2309.16039"
    scales = False
    caution = "a raised base is meant to be trained with: fine-tune before you rely on it."

    theta: float = param(
        help="The new base of the rotary frequencies, for example 500000.", min=1.0, search=(1e4, 1e8), paper=5e5
    )

    def theta_after(self, rotary: Rotary) -> float:
        """The base as given."""
        return self.theta
