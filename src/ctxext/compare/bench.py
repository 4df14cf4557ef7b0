"""A comparison as one line of JSON for each method, to be put beside those of other devices and models."""

import itertools
import json
from collections.abc import Iterator, Mapping
from typing import Any

from ctxext.evaluate.report.findings import pooled
from ctxext.evaluate.report.report import Report

BENCH = "bench.jsonl"
"""The file beside report.json."""


def bench(report: Report) -> str:
    """The lines: device, model and method; what was found at each length; seconds, and ratios to the stock model."""
    rows = {row["name"]: row for row in report["comparison"]["models"]}
    return "".join(json.dumps(_line(report, model, rows[model["name"]])) + "\n" for model in report["models"])


def _line(report: Report, model: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
    content, settings = report["comparison"], report["settings"]
    return {
        "device": _hardware(model.get("device") or "cpu"),
        "model": content["source"],
        "method": model["name"],
        "target_length": content["target_length"],
        **{name: model.get(name) for name in ("recipe", "digest", "dtype", "attention")},
        **{name: settings[name] for name in ("samples", "depths", "seed")},
        "cells": list(_cells(model)),
        "seconds": model.get("seconds"),
        "peak_memory": row.get("peak"),
        **{f"{name}_against_stock": row.get(name) for name in ("time", "memory")},
        "versions": report["versions"],
    }


def _cells(model: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The cells of a task at a length in one, over all depths."""
    for (task, length), group in itertools.groupby(model["cells"], key=lambda cell: (cell["task"], cell["length"])):
        cells = list(group)
        share, low, high = pooled(cells)
        asked = sum(cell["samples"] for cell in cells)
        seconds = round(sum(cell["seconds"] for cell in cells), 3)
        yield {
            "task": task, "length": length, "questions": asked, "share": share, "low": low, "high": high,
            "seconds": seconds,
        }  # fmt: skip


def _hardware(device: str) -> str:
    """The name of an accelerator, or the kind of processor."""
    import platform

    import torch

    if device.startswith("cuda"):
        return torch.cuda.get_device_name(torch.device(device))
    return f"{device}, {platform.machine()}"
