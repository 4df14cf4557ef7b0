"""NTK-aware scaling, static."""

from typing_extensions import override

from ctxext.errors import CtxextError
from ctxext.recipes.base import Scaling
from ctxext.recipes.encodings.rotary import Rotary


class Ntk(Scaling):
    """Raise the RoPE base: the fastest frequency stays, the slowest is divided by the factor. Every engine runs it.

    The base b becomes b · s^(d / (d - 2)), so only rope_theta changes. Use it for engines without other schedules;
    otherwise prefer yarn. bloc97, "NTK-aware scaled RoPE", June 2023; Peng et al. 2023, section 3.1.
    """

    name = "ntk"
    title = "NTK-aware scaling"
    paper = "https://arxiv.org/abs/2309.00071"

    @override
    def theta_after(self, rotary: Rotary) -> float:
        if rotary.dim <= 2:
            raise CtxextError("A head with one rotating pair has no base to raise.", hint="Use --method pi.")
        return float(rotary.theta * self.scaling_factor ** (rotary.span / (rotary.dim - 2)))
