"""The files of a comparison besides its report: the results as Markdown, and a JSON line per method."""

import dataclasses
import itertools
import json
from collections.abc import Iterator, Mapping
from typing import Any

from ctxext.compare import tables
from ctxext.compare.verdict import format_difference
from ctxext.files.strict import in_markdown
from ctxext.report.findings import format_count, pool_cells
from ctxext.report.report import Report, heat_map, tasks_of
from ctxext.report.tables import Table

PAGE, BENCH = "comparison.md", "bench.jsonl"
"""The files next to report.json."""


def format_markdown(report: Report) -> str:
    """Format the verdict, a table for each task by length and depth, and the cost of each method as Markdown."""
    content, settings = report["comparison"], report["settings"]
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    loaded = report["models"][0]
    lines = [f"# {in_markdown(content['source'])} to {content['target_length']} tokens", ""]
    lines += [in_markdown(content["verdict"]), ""]
    questions = format_count(settings["samples"], "question")
    lines += [f"{questions} per depth, seed {settings['seed']}, {loaded.get('dtype')} on "]
    lines[-1] += f"{loaded.get('device')}; {versions}. Confidence intervals are 95 %, those of differences "
    lines[-1] += f"{100 * content['confidence']:.3g} %, as {len(report['models']) - 1} methods are compared."
    costs = _tabulate_costs(report)
    scores = [tables.tabulate_scores(heat_map(report["models"], task)) for task in tasks_of(report)]
    losses = tables.tabulate_losses(content["models"], format_difference)
    for table in (*scores, costs, *([losses] if losses.rows else [])):
        lines += ["", table.as_markdown()]
    refused = [
        in_markdown(f"- {row['name']} does not apply: {row['refused']}") for row in content["models"] if row["refused"]
    ]
    return "\n".join([*lines, *([""] if refused else []), *refused]) + "\n"


def tabulate_differences(report: Report) -> Table:
    """Tabulate the differences of each method from the unmodified model, for report.html."""
    content = report["comparison"]
    note = f"With {100 * content['confidence']:.3g} % confidence intervals, as {len(report['models']) - 1} methods are "
    note += "compared. Found: beyond the original context length, in percentage points. Losses: in nats per token."
    table = _tabulate_costs(report)
    head = ["model", *table.head[1:]]
    return dataclasses.replace(table, title="Differences from the unmodified model", head=head, note=note)


def _tabulate_costs(report: Report) -> Table:
    rows = [row for row in report["comparison"]["models"] if row.get("against") or row.get("beyond")]
    return tables.tabulate_costs(rows, format_difference)


def format_bench(report: Report) -> str:
    """Format one line of JSON for each method, for comparisons with other devices and models."""
    rows = {row["name"]: row for row in report["comparison"]["models"]}
    return "".join(json.dumps(_bench_line(report, model, rows[model["name"]])) + "\n" for model in report["models"])


def _bench_line(report: Report, model: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
    content, settings = report["comparison"], report["settings"]
    return {
        "device": _hardware(model.get("device") or "cpu"),
        "model": content["source"],
        "method": model["name"],
        "target_length": content["target_length"],
        **{name: model.get(name) for name in ("recipe", "digest", "dtype", "attention")},
        **{name: settings[name] for name in ("samples", "depths", "seed")},
        "cells": list(_bench_cells(model)),
        "seconds": model.get("seconds"),
        "peak_memory": row.get("peak"),
        **{f"{name}_against_unmodified": row.get(name) for name in ("time", "memory")},
        "versions": report["versions"],
    }


def _bench_cells(model: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield one cell for each task and length, pooled over all depths."""
    for (task, length), group in itertools.groupby(model["cells"], key=lambda cell: (cell["task"], cell["length"])):
        cells = list(group)
        share, low, high = pool_cells(cells)
        questions = sum(cell["samples"] for cell in cells)
        seconds = round(sum(cell["seconds"] for cell in cells), 3)
        yield {
            "task": task, "length": length, "questions": questions, "share": share, "low": low, "high": high,
            "seconds": seconds,
        }  # fmt: skip


def _hardware(device: str) -> str:
    """Return the name of an accelerator, or the kind of processor."""
    import platform

    import torch

    module: Any = None if device == "cpu" else torch.get_device_module(device)
    if hasattr(module, "get_device_name"):
        return str(module.get_device_name(torch.device(device)))
    return f"{device}, {platform.machine()}"
