"""Estimates of the time to read texts, from those that were read, and their format."""

import math
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any

from ctxext.checkpoint.families import (
    FAMILIES,
    full_attention_layers,
    layer_types,
    read,
    sliding_layers,
    window_of,
)

_USUAL_BREAK_EVEN = 8192
_MINUTE = 60
_UNIT = 64
"""Tokens without attention in a unit of cost."""
_NUM_FITTED = 2
"""Number of first texts that are fitted, the longest; shorter ones are mostly overhead."""
_TIE = 0.2
"""Weight of the ratio of operations in a fit: times vary by some percent, and the ratio by some tens of percent."""
_BESIDE = 1.2
"""Ratio of the time of a task to that of reading its texts; 1.03 to 1.4 for the first tasks of SmolLM2."""
_PREPARED = 0.005
"""Seconds to make a prompt or question and to score its answer, which matter for small models only."""
_WRITTEN = 0.2
"""Share of the allowed tokens that an answer is estimated to have: a right one ends the generation."""
CPU_PIECE = 512
"""Tokens that a model with a window reads at once on a CPU (`models/reading.py`)."""


def break_even(config: Mapping[str, Any]) -> float:
    """Compute the length of a text for which attention scores cost as much as all other operations."""
    family = FAMILIES.get(str(config.get("model_type")))
    keys = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")
    sizes = [read(config, family, key) if family else None for key in keys]
    hidden, heads, key_heads, head_dim, wide = (size if isinstance(size, int) else None for size in sizes)
    if not hidden or not heads or not head_dim:
        return _USUAL_BREAK_EVEN
    wide = wide or 4 * hidden
    return hidden * (2 * (heads + (key_heads or heads)) * head_dim + 3 * wide) / (heads * head_dim)


def size_of(config: Mapping[str, Any]) -> Hashable:
    """Return a value that is equal for models of the same size and attention, which take the same time."""
    family = FAMILIES.get(str(config.get("model_type")))
    keys = ("hidden_size", "num_hidden_layers", "vocab_size")
    return *(read(config, family, key) if family else None for key in keys), break_even(config), _attention_of(config)


def count_work(length: int, even: float, attended: float | None = None) -> float:
    """Return the work of reading a text of `length` tokens, in units of a token without attention; see `break_even`.

    Each token attends to `attended` tokens, on average of all layers; by default to the whole text.
    """
    return length * (1 + (length if attended is None else attended) / even)


def cost_of(config: Mapping[str, Any]) -> Callable[[int], int]:
    """Return a function that computes the cost of a prompt from its length, in whole numbers to count progress.

    Tokens of long prompts cost more, but not in layers with a window or a state, and every prompt has a fixed cost.
    """
    even, attention = break_even(config), _attention_of(config)

    def cost(length: int) -> int:
        return 1 + round(count_work(length, even, _mean_attended(attention, length)) / _UNIT)

    return cost


class Pace:
    """The seconds that models of one size take to read texts, learned from the texts that they read.

    A text takes `step + linear × tokens + quadratic × tokens × attended tokens` seconds: those of a single token, and,
    as attention and the other operations differ in speed. The last two numbers fit all texts that the first model read,
    by least squares of relative errors, with a weak tie to the ratio of operations while all have about the same
    length. Another model, and a task that reads a text several times or generates an answer, take a multiple of that.

    Args:
        config: The configuration of the models.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._even, self._attention = break_even(config), _attention_of(config)
        self._read: list[tuple[float, float]] = []
        self._linear = self._quadratic = 0.0
        self._ratios: dict[tuple[str, str], dict[int, float]] = {}
        self._step = 0.0

    def begin(self, model: str, read: Sequence[tuple[int, float]]) -> None:
        """Begin with numbers of tokens and the seconds in which the first model read each: one token, then more."""
        self._step = read[0][1] + _PREPARED
        for tokens, seconds in (read[1:] or read)[-_NUM_FITTED:]:
            if seconds > 0:
                self._fit([tokens], seconds)
        self._ratios[model, ""] = {read[-1][0]: 1.0}

    @property
    def is_known(self) -> bool:
        """Whether anything was read."""
        return bool(self._read)

    def record(
        self, model: str, task: str, lengths: Sequence[int], seconds: float, *, is_written: bool = False
    ) -> None:
        """Record texts that a model read together for a task.

        Args:
            model: The name of the model; others are compared with that of the first call.
            task: The name of the task.
            lengths: Numbers of tokens.
            seconds: The time for all.
            is_written: Whether the time includes the generation of answers.
        """
        if not lengths or seconds <= 0:
            return
        if not self._read or (model == next(iter(self._ratios))[0] and not is_written):
            self._fit(lengths, seconds)
        ratios = self._ratios.setdefault((model, task), {})
        ratios[max(lengths)] = seconds / math.fsum(map(self._base, lengths))

    def estimate(
        self, model: str, task: str, lengths: Collection[int], num_written: int = 0, unseen: float = 1.0
    ) -> float:
        """Estimate the seconds for texts and the answers to them; 0 if nothing was read.

        Args:
            model: The name of the model.
            task: The name of the task.
            lengths: Numbers of tokens.
            num_written: The largest number of generated tokens, which counts before the task was recorded.
            unseen: The ratio to the first model, for a model that read nothing.
        """
        seconds = math.fsum(self._base(length) * self._ratio(model, task, length, unseen) for length in lengths)
        is_recorded = any(known == task for _, known in self._ratios)
        return seconds if is_recorded else _BESIDE * (seconds + _WRITTEN * self._step * num_written)

    def _ratio(self, model: str, task: str, length: int, unseen: float) -> float:
        """Return the ratio at the nearest length that the model read for the task, or that of the most similar work."""
        if (model, task) in self._ratios:
            ratios = self._ratios[model, task]
            return ratios[min(ratios, key=lambda known: abs(math.log(known / length)))]
        if of_model := [max(ratios.values()) for (name, _), ratios in self._ratios.items() if name == model]:
            return max(of_model)
        of_task = [max(ratios.values()) for (_, name), ratios in self._ratios.items() if name == task]
        return max(of_task, default=1.0) * unseen

    def _count_attended(self, length: int) -> float:
        return length * _mean_attended(self._attention, length)

    def _base(self, length: int) -> float:
        return self._step + self._linear * length + self._quadratic * self._count_attended(length)

    def _fit(self, lengths: Sequence[int], seconds: float) -> None:
        """Add texts, and fit the two numbers, both at least 0."""
        seconds = max(seconds - self._step * len(lengths), seconds / 2)  # Texts of a batch share the step.
        self._read.append((sum(lengths) / seconds, math.fsum(map(self._count_attended, lengths)) / seconds))
        # The tie is another row: linear - even × quadratic = 0.
        size = _TIE * math.fsum(tokens for tokens, _ in self._read) / len(self._read)
        rows = [*((*each, 1.0) for each in self._read), (size, -size * self._even, 0.0)]
        aa, ab, bb, at, bt = (
            math.fsum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1), (0, 2), (1, 2))
        )
        linear, quadratic = bb * at - ab * bt, aa * bt - ab * at
        if quadratic < 0:
            self._linear, self._quadratic = at / aa, 0.0
        elif linear < 0:
            self._linear, self._quadratic = 0.0, bt / bb
        else:
            self._linear, self._quadratic = linear / (aa * bb - ab * ab), quadratic / (aa * bb - ab * ab)


def _attention_of(config: Mapping[str, Any]) -> tuple[float, float, int]:
    """Return the share of layers that attend to everything, the share with a window or chunks, and their tokens."""
    family = FAMILIES.get(str(config.get("model_type")))
    num_layers = len(layer_types(config, family)) if family else 0
    if family is None or not num_layers:
        return 1.0, 0.0, 0
    sliding = sliding_layers(config, family)
    window = window_of(config, family) if sliding else 0
    if not isinstance(window, int):
        return 1.0, 0.0, 0
    return len(full_attention_layers(config, family)) / num_layers, len(sliding) / num_layers, window


def _mean_attended(attention: tuple[float, float, int], length: int) -> float:
    """Return the number of tokens that a token of a text attends to, on average of all layers."""
    full, sliding, window = attention
    return full * length + sliding * min(length, window + CPU_PIECE)


def estimate_seconds(lengths: Iterable[int], measured: tuple[int, float], cost: Callable[[int], float]) -> float:
    """Estimate the seconds to read texts.

    Args:
        lengths: Numbers of tokens.
        measured: The number of tokens of a text that was read, and its seconds.
        cost: Returns the cost of a text from its length.
    """
    length, seconds = measured
    return seconds / cost(length) * sum(map(cost, lengths))


def format_duration(seconds: float) -> str:
    """Format a time in seconds, minutes or hours."""
    if seconds < 2 * _MINUTE:
        return f"{seconds:.0f} s"
    minutes = round(seconds / _MINUTE)
    return f"{minutes} min" if minutes < 2 * _MINUTE else f"{minutes / _MINUTE:.1f} h"
