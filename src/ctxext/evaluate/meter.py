"""How far an evaluation is, in units that take alike long, and how much time is left."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from ctxext.evaluate.plan import ModelPlan
from ctxext.files import Progress

_UNIT = 64
_MINUTE = 60
_LONG = 10 * _MINUTE
_USUAL_BREAK_EVEN = 8192


class Meter:
    """Counts work by what it costs: a token of a long prompt costs more than one of a short prompt.

    Args:
        plans: Everything that is asked.
        progress: Told of every step.
        samples: Of each cell, for the advice.
        clock: Seconds.
    """

    def __init__(
        self,
        plans: Sequence[ModelPlan],
        progress: Progress | None,
        samples: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.progress, self.samples, self.clock = progress, samples, clock
        self._break_even = {plan.info.name: break_even(plan.info.checkpoint.config) for plan in plans}
        self.total = sum(self._plan_cost(plan) for plan in plans)
        self.reached = self._spent = 0
        self._seconds, self._at = 0.0, clock()
        count, tokens = sum(plan.num_samples for plan in plans), sum(plan.num_tokens for plan in plans)
        self._tell(f"{count:,} prompts and documents of {tokens:,} tokens", 0)

    def cost(self, model: str, length: int) -> int:
        """What one prompt of a length costs a model; never 0."""
        return 1 + round(length * (1 + length / self._break_even[model]) / _UNIT)

    def begin(self) -> None:
        """From now on it is the asking that takes the time, not the loading."""
        self._at = self.clock()

    def skip(self, model: str, lengths: Sequence[int], label: str) -> None:
        """Count prompts that need no asking."""
        self._tell(label, sum(self.cost(model, length) for length in lengths))

    def skip_plan(self, plan: ModelPlan) -> None:
        """Count everything of a model."""
        self._tell(plan.info.name, self._plan_cost(plan))

    def advance(self, model: str, lengths: Sequence[int], label: str) -> None:
        """Count prompts that were asked, and tell how long the rest will take."""
        now = self.clock()
        self._seconds, self._at = self._seconds + now - self._at, now
        cost = sum(self.cost(model, length) for length in lengths)
        self._spent += cost
        left = self._seconds / self._spent * (self.total - self.reached - cost)
        advice = f", half of it with --samples {max(1, self.samples // 2)}" if left >= _LONG else ""
        self._tell(f"{label} ({_in_words(left)} left{advice})", cost)

    def _plan_cost(self, plan: ModelPlan) -> int:
        prompts = len(plan.tasks) * len(plan.settings.depths) * plan.settings.samples
        name = plan.info.name
        documents = sum(self.cost(name, key.length) for work in plan.documents for key in work.keys)
        return documents + prompts * sum(self.cost(name, length) for length in plan.lengths)

    def _tell(self, label: str, cost: int) -> None:
        self.reached += cost
        if self.progress is not None:
            self.progress(label, self.reached, self.total)


def break_even(config: dict[str, Any]) -> float:
    """The length in tokens at which attention's scores cost as much as everything that is done token by token."""
    config = config.get("text_config") or config
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    if not hidden or not heads:
        return _USUAL_BREAK_EVEN
    head_dim = config.get("head_dim") or hidden // heads
    key_heads = config.get("num_key_value_heads") or heads
    wide = config.get("intermediate_size") or 4 * hidden
    return float(hidden * (2 * (heads + key_heads) * head_dim + 3 * wide) / (heads * head_dim))


def _in_words(seconds: float) -> str:
    if seconds < 2 * _MINUTE:
        return f"{seconds:.0f} s"
    minutes = round(seconds / _MINUTE)
    return f"{minutes} min" if minutes < 2 * _MINUTE else f"{minutes / _MINUTE:.1f} h"
