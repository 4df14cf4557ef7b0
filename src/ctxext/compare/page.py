"""The files of a comparison besides its report: the results as Markdown, and a JSON line per method."""

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ctxext.compare.verdict import engines_of, format_difference, inside_of
from ctxext.evaluate.report.findings import format_percent, pool_cells
from ctxext.evaluate.report.report import HeatMap, Report, heat_map, tasks_of
from ctxext.evaluate.report.tables import Table, in_percent
from ctxext.files.strict import in_markdown

PAGE, BENCH = "comparison.md", "bench.jsonl"
"""The files next to report.json."""


def format_markdown(report: Report) -> str:
    """Format the verdict, a table for each task by length and depth, and the cost of each method as Markdown."""
    content, settings = report["comparison"], report["settings"]
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    loaded = report["models"][0]
    lines = [f"# {in_markdown(content['source'])} to {content['target_length']} tokens", ""]
    lines += [in_markdown(content["verdict"]), ""]
    lines += [f"{settings['samples']} questions per depth, seed {settings['seed']}, {loaded.get('dtype')} on "]
    lines[-1] += f"{loaded.get('device')}; {versions}. Confidence intervals are 95 %, those of differences "
    lines[-1] += f"{100 * content['confidence']:.3g} %, as {len(report['models']) - 1} methods are compared."
    for task in tasks_of(report):
        lines += ["", _task(heat_map(report["models"], task))]
    head = ("against stock", "found, points", "loss beyond", "cost inside", "time", "memory", "served in")
    rows = [_cost(row) for row in content["models"] if row.get("against") or row.get("beyond")]
    lines += ["", _table(head, rows)]
    if (apart := beyond_by_text(content["models"], format_difference)).rows:
        lines += ["", _table(("loss beyond, against stock", *apart.head), apart.rows)]
    refused = [
        in_markdown(f"- {row['name']} does not apply: {row['refused']}") for row in content["models"] if row["refused"]
    ]
    return "\n".join([*lines, *([""] if refused else []), *refused]) + "\n"


def beyond_by_text(rows: Sequence[Mapping[str, Any]], shown: Callable[[Mapping[str, Any] | None], str]) -> Table:
    """Return a table of the losses on each kind of text, formatted by `shown`. It is empty without such losses."""
    measured = [row for row in rows if row.get("beyond_by_text")]
    texts = list(dict.fromkeys(text for row in measured for text in row["beyond_by_text"]))
    cells = [[row["name"], *(shown(row["beyond_by_text"].get(text)) for text in texts)] for row in measured]
    return Table("loss beyond", texts, cells)


def ratios(row: Mapping[str, Any]) -> list[str]:
    """Return the time and the memory of a method, relative to the unmodified model."""
    return [f"× {ratio:.2f}" if ratio else "–" for ratio in (row["time"], row["memory"])]


def _task(scores: HeatMap) -> str:
    """Format a table of models by lengths; each cell contains the share found, in total and by depth."""

    def cell(model: Mapping[str, Any], length: int) -> str:
        cells = [cell for cell in scores.row(model, length) if cell]
        if not cells:
            return "–"
        share, interval = in_percent(cells)
        return f"**{share}** ({interval}): {' '.join(format_percent(cell['share']) for cell in cells)}"

    rows = [[model["name"], *(cell(model, length) for length in scores.lengths)] for model in scores.models]
    return _table((f"{scores.task}, %", *(f"{length} tokens" for length in scores.lengths)), rows)


def _cost(row: Mapping[str, Any]) -> list[str]:
    points = (
        format_difference(row["against"], 0, 100),
        format_difference(row["beyond"]),
        format_difference(inside_of(row)),
    )
    return [row["name"], *points, *ratios(row), ", ".join(engines_of(row))]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return Table("", head, rows).as_markdown("|---" * len(head) + "|")


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
        **{f"{name}_against_stock": row.get(name) for name in ("time", "memory")},
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
