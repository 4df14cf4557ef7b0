"""Effective length: up to which length a model keeps most of what it can do at the shortest."""

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

KEPT = 0.85
_DRAWS = 2000


def effective_lengths(cells: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The effective length over all tasks, and of each; None where fewer than two lengths were asked.

    It is the longest of the asked lengths up to which, at every length, a model keeps 85 % of its own figure at the
    shortest. Over several tasks the figure is the mean of theirs. The interval is made of draws from what is known of
    every figure (Jeffreys' beta distributions, seeded): 95 % of them have their effective length inside it.

    Args:
        cells: Of one model, as in report.json.
    """
    counts: dict[str, dict[int, tuple[float, int]]] = {}
    for cell in cells:
        own = counts.setdefault(cell["task"], {})
        correct, samples = own.get(cell["length"], (0, 0))
        own[cell["length"]] = correct + cell["correct"], samples + cell["samples"]
    if len({length for own in counts.values() for length in own}) < 2:
        return None
    return {
        "kept": KEPT,
        **_effective(counts),
        "tasks": {task: _effective({task: own}) for task, own in counts.items()},
    }


def _effective(counts: Mapping[str, Mapping[int, tuple[float, int]]]) -> dict[str, Any]:
    """Length (None where nothing is right at the shortest), its interval, and the figure it is measured by."""
    lengths = sorted(set.intersection(*(set(own) for own in counts.values())))
    figures = {length: _mean(own[length][0] / own[length][1] for own in counts.values()) for length in lengths}
    if not lengths or not figures[lengths[0]]:
        return {"length": None, "low": None, "high": None, "figure": 0.0}
    rng = random.Random(0)
    drawn = []
    for _ in range(_DRAWS):
        draw = {length: _mean(_draw(rng, *own[length]) for own in counts.values()) for length in lengths}
        drawn.append(_longest(draw))
    drawn.sort()
    low, high = drawn[round(0.025 * _DRAWS)], drawn[round(0.975 * _DRAWS) - 1]
    return {"length": _longest(figures), "low": low, "high": high, "figure": figures[lengths[0]]}


def _draw(rng: random.Random, correct: float, samples: int) -> float:
    return rng.betavariate(correct + 0.5, samples - correct + 0.5)


def _mean(values: Iterable[float]) -> float:
    known = list(values)
    return math.fsum(known) / len(known)


def _longest(figures: Mapping[int, float]) -> int:
    shortest, *others = sorted(figures)
    reached = shortest
    for length in others:
        if figures[length] < KEPT * figures[shortest]:
            break
        reached = length
    return reached
