"""Adjusted base frequency."""

from collections.abc import Mapping
from typing import Any, ClassVar

from typing_extensions import override

from ctxext.recipes.base import Scaling
from ctxext.recipes.encodings.rotary import Rotary
from ctxext.recipes.param import SearchRange, param, search_start


class AdjustedBase(Scaling):
    """Set the RoPE base to a chosen value, before training on long texts.

    The base b becomes --theta. Xiong et al. 2023, section 4.1 (500000 for Llama 2 at 32k).
    """

    name = "abf"
    title = "Adjusted base frequency"
    paper = "https://arxiv.org/abs/2309.16039"
    kind = "base"
    neutral: ClassVar[Mapping[str, Any]] = {"factor": 1, "theta": 1e4}  # The base of most models.
    example: ClassVar[Mapping[str, Any]] = {"factor": 4, "theta": 3e5}
    caution = "a raised base needs training: fine-tune the model before use."

    theta: float = param(help="The new RoPE base (rope_theta), for example 500000.", min=1.0, usual=5e5)

    @classmethod
    @override
    def search_space(cls, rotary: Rotary, factor: float) -> dict[str, SearchRange]:
        # NTK-aware scaling would multiply the base by slightly more than the factor; the range includes higher ones.
        most = 4 * rotary.theta * factor**2
        paper = search_start(cls, "theta")
        return {"theta": SearchRange((rotary.theta, most), paper if rotary.theta < paper < most else None)}

    @override
    def summary(self) -> str:
        return f"{super().summary()} theta {self.theta:g}"

    @override
    def theta_after(self, rotary: Rotary) -> float:
        return self.theta
