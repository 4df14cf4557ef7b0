"""Row-wise schedules: every row with the frequencies that its own length needs."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ctxext.recipes.base import Scaling
from ctxext.recipes.code.method import PORTABLE
from ctxext.recipes.encodings.frequencies import inverse_frequencies
from ctxext.recipes.encodings.rotary import ModelConfig, Rotary, attention_scaling, check_known
from ctxext.recipes.methods.llama3 import Llama3
from ctxext.recipes.methods.longrope import LongRope
from ctxext.recipes.methods.ntk import Ntk
from ctxext.recipes.methods.ntk_by_parts import NtkByParts
from ctxext.recipes.methods.pi import PositionInterpolation
from ctxext.recipes.methods.relation import Relation
from ctxext.recipes.methods.yarn import Yarn
from ctxext.recipes.param import param

AROUND: Mapping[str, type[Scaling]] = {
    method.name: method for method in (PositionInterpolation, Ntk, NtkByParts, Yarn, Llama3, LongRope)
}
"""The schedules that a row may use."""


@dataclass(frozen=True, kw_only=True)
class Adaptive(Relation):
    """Use a schedule only as far as each position needs, so that short inputs cost nothing. No training.

    Row m reads with the frequencies and the temperature of the smallest factor s of 1, 2, 4 ... that holds m + 1
    tokens, and rows inside L as they were: what `dynamic` means to do, without disagreeing with its cache. On a
    schedule that is there already, every frequency is slowed as a plain one of the same wavelength would be.
    """

    name = "adaptive"
    title = "Row-wise schedule"
    paper = "https://arxiv.org/abs/2309.00071"
    code = (PORTABLE / "adaptive.py", *Relation.code)
    code_class = "Adaptive"

    around: str = param(
        "yarn", help="Whose frequencies a row uses.", choices=tuple(AROUND), search=("yarn", "ntk-by-parts", "llama3")
    )
    long_factor: tuple[float, ...] | None = param(
        None, help="Around longrope: one divisor per rotated pair at the full factor: a file with a list of numbers."
    )

    def problem(self, length: int, target: int) -> tuple[str, str] | None:
        """LongRoPE needs its list."""
        if (self.around == "longrope") != (self.long_factor is not None):
            return "long_factor goes with longrope, and longrope needs it.", "--around longrope --long-factor FILE"
        return None

    def summary(self) -> str:
        """The step with what it is around."""
        return f"{super().summary()} around {self.around}"

    def settings(self, model: ModelConfig) -> dict[str, Any]:
        """For every factor its inverse frequencies and its factor on cos and sin, as lists.

        Raises:
            CtxextError: the frequencies of the schedule that is there are not known.
        """
        check_known(model.config, model.family)
        found = super().settings(model)
        step, own = self.resolved(model.rotary), model.rotary
        plain = dataclasses.replace(own, trained_length=own.context_length, parameters={"rope_type": "default"})
        assert step.factor is not None, "resolved"
        factors = rungs(step.factor)
        schedules = [self._at(factor, step.factor, plain) for factor in factors]
        rows = [inverse_frequencies(one) for one in schedules]
        base = inverse_frequencies(plain)
        if own.rope_type != "default":
            there = inverse_frequencies(own, own.context_length)
            rows, base = [slowed_alike(there, base, row) for row in rows], there
        for name in ("around", "long_factor"):
            found.pop(name, None)
        return {
            **found,
            "base": base,
            "factors": factors,
            "inverse_frequencies": rows,
            "attention_factors": [attention_scaling(one) for one in schedules],
        }

    def _at(self, factor: float, largest: float, rotary: Rotary) -> Rotary:
        """The encoding that the schedule makes at a factor, the same at any length."""
        numbers: dict[str, Any] = {}
        if self.around == "longrope":
            share = 1.0 if factor == largest else math.log(factor) / math.log(largest)
            divisors = tuple(divisor**share for divisor in self.long_factor or ())
            numbers = {"long_factor": divisors, "short_factor": divisors}
        step = AROUND[self.around](factor=factor, **numbers)
        parameters = {"rope_type": step.rope_type, **step.schedule(rotary)}
        return dataclasses.replace(rotary, theta=step.theta_after(rotary), parameters=parameters)


def slowed_alike(there: list[float], plain: list[float], slowed: list[float]) -> list[float]:
    """The frequencies of a schedule that stands already, each slowed as a plain one of the same wavelength would be.

    Args:
        there: The frequencies to slow.
        plain: Those of the model without its schedule, falling.
        slowed: What a schedule makes of the plain ones.
    """
    kept = [new / old for old, new in zip(plain, slowed, strict=True)]
    step = math.log(plain[0] / plain[1])
    found = []
    for one in there:
        place = min(max(math.log(plain[0] / one) / step, 0.0), len(plain) - 1.0)
        left = min(int(place), len(plain) - 2)
        share = kept[left] + (kept[left + 1] - kept[left]) * (place - left)
        found.append(one * share)
    return found


def rungs(factor: float) -> list[float]:
    """2, 4, 8 ... below the factor, and the factor itself."""
    return [*(2.0**i for i in range(1, (math.ceil(factor) - 1).bit_length())), float(factor)]
