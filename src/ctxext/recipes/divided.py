"""Schedules that give every frequency a divisor of its own, by a formula; carried as LongRoPE's lists."""

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ctxext.errors import CtxextError
from ctxext.families import Family
from ctxext.recipes.base import Scaling
from ctxext.recipes.frequencies import inverse_frequencies
from ctxext.recipes.param import param
from ctxext.recipes.rotary import Config, ModelConfig, Rotary
from ctxext.recipes.yarn import check_ends

_STILL = 1e6
"""The divisor of a frequency that no longer rotates: a list cannot hold infinity."""


@dataclass(frozen=True, kw_only=True)
class Divided(Scaling):
    """What these schedules share: one list for all lengths, so that neither cache nor batch changes anything."""

    rope_type = "longrope"

    @classmethod
    def refusal(cls, config: Config, family: Family) -> str:
        """Why the family cannot carry the schedule; empty where it can."""
        allowed = family.rope_scaling_keys.get(cls.rope_type)
        if allowed is not None and "attention_factor" not in allowed:
            return "its configuration class takes no factor on cosine and sine, which this schedule needs"
        return super().refusal(config, family)

    def edit(self, model: ModelConfig) -> ModelConfig:
        """Write the lists into the configuration.

        Raises:
            CtxextError: the schedule is already scaled, or the family cannot carry this one.
        """
        if reason := self.refusal(model.config, model.family):
            raise CtxextError(f'"{model.family.model_type}": {reason}.', hint="Choose another method.")
        return super().edit(model)

    @abstractmethod
    def divisors(self, rotary: Rotary) -> list[float]:
        """How many times slower each rotated pair becomes."""

    def attention_factor(self) -> float:
        """The factor on cos and sin; YaRN's."""
        return 0.1 * math.log(self.stretch) + 1

    def schedule(self, rotary: Rotary) -> Mapping[str, Any]:
        """The `longrope` type of transformers with equal lists."""
        divisors = self.divisors(rotary)
        return {
            "factor": self.stretch,
            "original_max_position_embeddings": rotary.trained_length,
            "short_factor": divisors,
            "long_factor": list(divisors),
            "attention_factor": self.attention_factor(),
        }


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


@dataclass(frozen=True, kw_only=True)
class Resonance(Divided):
    """YaRN with every wavelength rounded to a whole number of tokens, so that phases repeat exactly. No training.

    At factor 1 nothing is rounded. Wang et al. 2024, section 4.
    """

    name = "resonance"
    title = "Resonance RoPE on YaRN"
    paper = "https://arxiv.org/abs/2403.00071"
    is_experimental = True

    beta_fast: float = param(
        32.0, help="Rotations within the original length above which YaRN leaves a dimension as it was.", min=0
    )
    beta_slow: float = param(1.0, help="Rotations below which YaRN interpolates a dimension fully.", min=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ends(self.name, self.beta_fast, self.beta_slow)

    def divisors(self, rotary: Rotary) -> list[float]:
        """From the model's own wavelengths to YaRN's rounded ones."""
        plain = inverse_frequencies(rotary.with_parameters({"rope_type": "default"}))
        if self.stretch == 1:
            return [1.0] * len(plain)
        ramp = {"factor": self.stretch, "beta_fast": self.beta_fast, "beta_slow": self.beta_slow}
        slowed = inverse_frequencies(rotary.with_parameters({"rope_type": "yarn", **ramp}))
        return [old * round(2 * math.pi / new) / (2 * math.pi) for old, new in zip(plain, slowed, strict=True)]


@dataclass(frozen=True, kw_only=True)
class Cope(Divided):
    """Fade the slowest dimensions out along a cosine, on top of a raised base. Meant to be trained with.

    The last c frequencies are multiplied by (1 + cos(π · (i - i0) / (c - 1))) / 2, so that the slowest one no longer
    rotates. "CoPE", arXiv 2602.05258, section 3.
    """

    name = "cope"
    title = "CoPE"
    paper = "https://arxiv.org/abs/2602.05258"
    is_experimental = True
    neutral: ClassVar[Mapping[str, Any]] = {"factor": 1, "num_faded": 0}
    caution = "it is meant to be trained with: fine-tune before you rely on it."

    theta: float | None = param(None, help="The new base of the frequencies; the model's own where not given.", min=1.0)
    num_faded: int | None = param(
        None,
        help="How many of the slowest pairs fade, c; three quarters of those that never complete a rotation.",
        min=0,
    )

    def theta_after(self, rotary: Rotary) -> float:
        """The base as given, or the model's own."""
        return self.theta or rotary.theta

    def attention_factor(self) -> float:
        """None of its own."""
        return 1.0

    def divisors(self, rotary: Rotary) -> list[float]:
        """The inverse of the fading, which ends in a very large number."""
        pairs, base = rotary.dim // 2, self.theta_after(rotary)
        never = sum(2 * math.pi * base ** (2 * i / rotary.span) > rotary.trained_length for i in range(pairs))
        count = min(round(0.75 * never) if self.num_faded is None else self.num_faded, pairs)
        found = [1.0] * pairs
        for step in range(count):
            kept = (1 + math.cos(math.pi * step / max(count - 1, 1))) / 2
            found[pairs - count + step] = 1 / max(kept, 1 / _STILL)
        return found
