"""Estimates of the time to read texts, from one that was read, and their format."""

from collections.abc import Callable, Iterable, Mapping
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


def count_work(length: int, even: float, attended: float | None = None) -> float:
    """Return the work of reading a text of `length` tokens, in units of a token without attention; see `break_even`.

    Each token attends to `attended` tokens, on average of all layers; by default to the whole text.
    """
    return length * (1 + (length if attended is None else attended) / even)


def cost_of(config: Mapping[str, Any]) -> Callable[[int], int]:
    """Return a function that computes the cost of a prompt from its length, in whole numbers to count progress.

    Tokens of long prompts cost more, but not in layers with a window or a state, and every prompt has a fixed cost.
    """
    even, (full, sliding, window) = break_even(config), _attention_of(config)

    def cost(length: int) -> int:
        attended = full * length + sliding * min(length, window + CPU_PIECE)
        return 1 + round(count_work(length, even, attended) / _UNIT)

    return cost


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
