"""From the lines of a run to report.json: cells, curves, and what extending cost."""

import importlib.metadata
import math
import platform
from collections.abc import Sequence
from typing import Any

from ctxext.evaluate.report.effective_length import effective_lengths
from ctxext.evaluate.report.intervals import mean_interval, wilson_interval
from ctxext.evaluate.tasks.base import Record
from ctxext.version import __version__

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
