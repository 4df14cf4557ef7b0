"""From the lines of a run to report.json: cells, curves, and what extending cost."""

import importlib.metadata
import math
import platform
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ctxext.evaluate.report.intervals import mean_interval, wilson_interval
from ctxext.evaluate.tasks.base import Record
from ctxext.version import __version__

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
    figures = {length: _average(own[length][0] / own[length][1] for own in counts.values()) for length in lengths}
    if not lengths or not figures[lengths[0]]:
        return {"length": None, "low": None, "high": None, "figure": 0.0}
    rng = random.Random(0)
    drawn = []
    for _ in range(_DRAWS):
        draw = {length: _average(_draw(rng, *own[length]) for own in counts.values()) for length in lengths}
        drawn.append(_longest(draw))
    drawn.sort()
    low, high = drawn[round(0.025 * _DRAWS)], drawn[round(0.975 * _DRAWS) - 1]
    return {"length": _longest(figures), "low": low, "high": high, "figure": figures[lengths[0]]}


def _draw(rng: random.Random, correct: float, samples: int) -> float:
    return rng.betavariate(correct + 0.5, samples - correct + 0.5)


def _average(values: Iterable[float]) -> float:
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


_PACKAGES = ("torch", "transformers", "tokenizers")
Report = dict[str, Any]


def versions() -> dict[str, str]:
    """Of everything that decides a figure."""
    return {
        "ctxext": __version__,
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in _PACKAGES},
    }


def make_report(header: Record, records: Sequence[Record]) -> Report:
    """The content of report.json.

    Args:
        header: Settings, models and versions, as the results log begins.
        records: The log's lines, in any order.
    """
    models = []
    for model in header["models"]:
        own = [record for record in records if record.get("model") == model["name"]]
        facts: Record = next((record["facts"] for record in own if "facts" in record), {})
        lines = [record for record in own if "task" in record]
        models.append(
            {
                **model,
                **facts,
                "cells": _cells(header["settings"], lines),
                "perplexity": _perplexity([record for record in lines if "buckets" in record]),
                "short": _short([record for record in lines if record["task"] == "short"]),
                "harness": next((record["harness"] for record in own if "harness" in record), None),
                "seconds": round(math.fsum(record["seconds"] for record in lines), 3),
            }
        )
    for model in models:
        _compare_short(model, models)
        model["effective"] = effective_lengths(model["cells"])
    return {**header, "models": models}


def _cells(settings: dict[str, Any], records: Sequence[Record]) -> list[dict[str, Any]]:
    """Right answers by task, length and depth."""
    order = {task: number for number, task in enumerate(settings["tasks"])}
    groups: dict[tuple[str, int, float | None], list[Record]] = {}
    for record in records:
        if "correct" in record:
            groups.setdefault((record["task"], record["length"], record["depth"]), []).append(record)
    cells = []
    for task, length, depth in sorted(groups, key=lambda key: (order[key[0]], key[1], key[2] or 0.0)):
        own = groups[task, length, depth]
        answers = {sample: right for r in own for sample, right in zip(r["samples"], r["correct"], strict=True)}
        correct = sum(answers.values())
        low, high = wilson_interval(correct, len(answers))
        cells.append(
            {
                "task": task,
                "length": length,
                "depth": depth,
                "correct": correct,
                "samples": len(answers),
                "share": correct / len(answers),
                "low": low,
                "high": high,
                "seconds": round(math.fsum(record["seconds"] for record in own), 3),
            }
        )
    return cells


def _perplexity(records: Sequence[Record]) -> dict[str, Any] | None:
    """Loss by position over all documents, perplexity by context length, and the sliding window's figure."""
    records = sorted(records, key=lambda record: record["samples"][0])
    if not records:
        return None
    width = records[0]["width"]
    columns = zip(*(record["buckets"] for record in records), strict=True)
    found: dict[str, Any] = {
        "task": records[0]["task"],
        "documents": len(records),
        "length": records[0]["length"],
        "curve": [
            {"start": number * width, "end": min((number + 1) * width, records[0]["length"]), **_mean(column)}
            for number, column in enumerate(columns)
        ],
        "lengths": {
            length: _mean([record["lengths"][length] for record in records]) for length in records[0]["lengths"]
        },
    }
    if "sliding" in records[0]:
        found["sliding"] = {
            length: _mean([record["sliding"][length] for record in records]) for length in records[0]["sliding"]
        }
    return found


def _mean(sums: Any) -> dict[str, Any]:
    total, count = math.fsum(pair[0] for pair in sums), sum(pair[1] for pair in sums)
    loss = total / max(count, 1)
    return {"loss": loss, "perplexity": math.exp(min(loss, 700.0)), "count": count}


def _short(records: Sequence[Record]) -> dict[str, Any] | None:
    """Perplexity at the original context length."""
    records = sorted(records, key=lambda record: record["samples"][0])
    if not records:
        return None
    losses = [record["loss"][0] / record["tokens"][0] for record in records]
    figures = _mean([[record["loss"][0], record["tokens"][0]] for record in records])
    return {"length": records[0]["length"], "documents": len(records), **figures, "losses": losses}


def _compare_short(model: dict[str, Any], models: Sequence[dict[str, Any]]) -> None:
    """Set a model's loss at the original context length beside its source's, document by document."""
    own = model["short"]
    if own is None:
        return
    for other in models:
        theirs = other["short"]
        is_source = other["name"] == model["source"] and other is not model
        if is_source and theirs and len(theirs["losses"]) == len(own["losses"]) and theirs["length"] == own["length"]:
            pairs = zip(own["losses"], theirs["losses"], strict=True)
            mean, half = mean_interval([mine - other_loss for mine, other_loss in pairs])
            low, high = (mean - half, mean + half) if math.isfinite(half) else (None, None)
            own["against"] = {"model": other["name"], "loss": mean, "low": low, "high": high, "ratio": math.exp(mean)}
