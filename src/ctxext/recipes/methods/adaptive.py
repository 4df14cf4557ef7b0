"""Per-position schedules: every query position uses the frequencies for its own length."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from typing_extensions import override

from ctxext.recipes.base import Scaling
from ctxext.recipes.code.method import PORTABLE
from ctxext.recipes.encodings.frequencies import inverse_frequencies
from ctxext.recipes.encodings.rotary import Rotary, attention_scaling, check_known
from ctxext.recipes.methods.llama3 import Llama3
from ctxext.recipes.methods.longrope import LongRope
from ctxext.recipes.methods.ntk import Ntk
from ctxext.recipes.methods.ntk_by_parts import NtkByParts
from ctxext.recipes.methods.pi import PositionInterpolation
from ctxext.recipes.methods.relation import Relation
from ctxext.recipes.methods.yarn import Yarn
from ctxext.recipes.model_config import ModelConfig
from ctxext.recipes.param import param

AROUND: Mapping[str, type[Scaling]] = {
    method.name: method for method in (PositionInterpolation, Ntk, NtkByParts, Yarn, Llama3, LongRope)
}
"""The available schedules for a query position."""


class Adaptive(Relation):
    """Apply a schedule to each token only as far as its position needs, so that short inputs stay exact. No training.

    The query at position m uses the frequencies and the temperature of the smallest factor s of 1, 2, 4 ... that covers
    m + 1 tokens. Use it instead of dynamic: its results do not depend on the cache or the batch. On a model with a
    schedule, each frequency is scaled like a plain one of the same wavelength. Peng et al. 2023, section 3.3,
    applied to each position instead of to whole inputs.
    """

    name = "adaptive"
    title = "Per-position schedule"
    paper = "https://arxiv.org/abs/2309.00071"
    code = (PORTABLE / "adaptive.py", *Relation.code)
    code_class = "Adaptive"

    around: str = param(
        "yarn",
        help="Method that provides the schedule.",
        choices=tuple(AROUND),
        search=("yarn", "ntk-by-parts", "llama3"),
    )
    long_factor: tuple[float, ...] | None = param(
        None, help="With --around longrope: file with a list of divisors at the full factor, one per rotated pair."
    )

    @override
    def problem(self, length: int, target: int) -> tuple[str, str] | None:
        if (self.around == "longrope") != (self.long_factor is not None):
            return (
                "long_factor requires longrope, and longrope requires long_factor.",
                "--around longrope --long-factor FILE",
            )
        return None

    @override
    def summary(self) -> str:
        return f"{super().summary()} around {self.around}"

    @override
    def settings(self, model: ModelConfig) -> dict[str, Any]:
        # The frequencies are written as lists, because the code in a checkpoint cannot import the formulas.
        check_known(model.config, model.family)
        settings = super().settings(model)
        step, rotary = self.resolve(model.rotary), model.rotary
        plain = dataclasses.replace(rotary, trained_length=rotary.context_length, parameters={"rope_type": "default"})
        assert step.factor is not None, "resolve the step first"
        factors = factors_up_to(step.factor)
        schedules = [self._at(factor, step.factor, plain) for factor in factors]
        rows = [inverse_frequencies(schedule) for schedule in schedules]
        base = inverse_frequencies(plain)
        if rotary.rope_type != "default":
            present = inverse_frequencies(rotary, rotary.context_length)
            rows, base = [slow_by_wavelength(present, base, row) for row in rows], present
        for name in ("around", "long_factor"):
            settings.pop(name, None)
        return {
            **settings,
            "base": base,
            "factors": factors,
            "inverse_frequencies": rows,
            "attention_factors": [attention_scaling(schedule) for schedule in schedules],
        }

    def _at(self, factor: float, largest: float, rotary: Rotary) -> Rotary:
        """Return the encoding with the schedule at one factor, the same at any length."""
        numbers: dict[str, Any] = {}
        if self.around == "longrope":
            share = 1.0 if factor == largest else math.log(factor) / math.log(largest)
            divisors = tuple(divisor**share for divisor in self.long_factor or ())
            numbers = {"long_factor": divisors, "short_factor": divisors}
        step = AROUND[self.around](factor=factor, **numbers)
        parameters = {"rope_type": step.rope_type, **step.schedule(rotary)}
        return dataclasses.replace(rotary, theta=step.theta_after(rotary), parameters=parameters)


def slow_by_wavelength(present: list[float], plain: list[float], slowed: list[float]) -> list[float]:
    """Scale each frequency of a model with a schedule like a plain one of the same wavelength.

    Args:
        present: The model's frequencies.
        plain: Its frequencies without its schedule, in falling order.
        slowed: The plain frequencies after the schedule that is applied.
    """
    shares = [new / old for old, new in zip(plain, slowed, strict=True)]
    step = math.log(plain[0] / plain[1])
    scaled = []
    for frequency in present:
        index = min(max(math.log(plain[0] / frequency) / step, 0.0), len(plain) - 1.0)
        left = min(int(index), len(plain) - 2)
        share = shares[left] + (shares[left + 1] - shares[left]) * (index - left)
        scaled.append(frequency * share)
    return scaled


def factors_up_to(factor: float) -> list[float]:
    """Return the factors 2, 4, 8 ... below a factor, and the factor itself."""
    return [*(2.0**i for i in range(1, (math.ceil(factor) - 1).bit_length())), float(factor)]
