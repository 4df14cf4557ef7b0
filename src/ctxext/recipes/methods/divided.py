"""Schedules with a divisor for each frequency, computed by a formula and stored as LongRoPE's lists."""

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from typing_extensions import override

from ctxext.checkpoint.families import Family
from ctxext.errors import CtxextError
from ctxext.recipes.base import Scaling
from ctxext.recipes.encodings.base import Config
from ctxext.recipes.encodings.rotary import Rotary
from ctxext.recipes.methods.longrope import with_attention_factor
from ctxext.recipes.model_config import ModelConfig


class Divided(Scaling):
    """Base of these schedules: one list for all lengths, so that neither cache nor batch matters."""

    rope_type = "longrope"

    @classmethod
    @override
    def refusal(cls, config: Config, family: Family) -> str:
        allowed = family.rope_scaling_keys.get(cls.rope_type)
        if allowed is not None and "attention_factor" not in allowed:
            return "its configuration class supports no factor on cos and sin, which this schedule needs"
        return super().refusal(config, family)

    @override
    def edit(self, model: ModelConfig) -> ModelConfig:
        if reason := self.refusal(model.config, model.family):
            raise CtxextError(f'"{model.family.model_type}": {reason}.', hint="Choose another method.")
        return super().edit(model)

    @abstractmethod
    def divisors(self, rotary: Rotary) -> list[float]:
        """Return the divisor of each rotated pair's frequency."""

    def attention_factor(self) -> float:
        """Return the factor on cos and sin.

        By default it is YaRN's.
        """
        return 0.1 * math.log(self.scaling_factor) + 1

    @override
    def schedule(self, rotary: Rotary) -> Mapping[str, Any]:
        # With equal lists, the schedule does not depend on the length of the input.
        divisors = self.divisors(rotary)
        return {
            "factor": self.scaling_factor,
            "original_max_position_embeddings": rotary.trained_length,
            "short_factor": divisors,
            "long_factor": list(divisors),
            **with_attention_factor(self.attention_factor()),
        }
