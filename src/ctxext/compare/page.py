"""What is written of a comparison beside its report: Markdown for a page of results, and a line for each method."""

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ctxext.compare.verdict import engines_of, signed
from ctxext.evaluate.report.findings import percent, pooled
from ctxext.evaluate.report.report import HeatMap, Report, heat_map
from ctxext.files.strict import in_markdown

PAGE, BENCH = "comparison.md", "bench.jsonl"
"""The files beside report.json."""


def markdown(report: Report) -> str:
    """What a comparison says, a table for each task by length and depth, and what each method costs."""
    content, settings = report["comparison"], report["settings"]
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    loaded = report["models"][0]
    lines = [f"# {in_markdown(content['source'])} to {content['target_length']} tokens", ""]
    lines += [in_markdown(content["verdict"]), ""]
    lines += [f"{settings['samples']} questions a depth, seed {settings['seed']}, {loaded.get('dtype')} on "]
    lines[-1] += f"{loaded.get('device')}; {versions}. Intervals are 95 %, those of "
    lines[-1] += f"differences {100 * content['confidence']:.3g} %: {len(report['models']) - 1} methods are compared."
    for task in dict.fromkeys(cell["task"] for model in report["models"] for cell in model["cells"]):
        lines += ["", *_task(heat_map(report["models"], task))]
    headings = ("against stock", "found, points", "loss beyond", "cost inside", "time", "memory", "served in")
    lines += [
        "",
        *_table(headings, [_cost(row) for row in content["models"] if row.get("against") or row.get("beyond")]),
    ]
    if texts := texts_apart(content["models"]):
        rows = [
            [row["name"], *(signed(row["beyond_by_text"].get(text), 3) for text in texts)]
            for row in content["models"]
            if row.get("beyond_by_text")
        ]
        lines += ["", *_table(("loss beyond, against stock", *texts), rows)]
    refused = [
        in_markdown(f"- {row['name']} does not apply: {row['refused']}") for row in content["models"] if row["refused"]
    ]
    return "\n".join([*lines, *([""] if refused else []), *refused]) + "\n"


def texts_apart(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The kinds of text on which losses were measured apart."""
    return list(dict.fromkeys(text for row in rows for text in row.get("beyond_by_text") or ()))


def _task(scores: HeatMap) -> Iterator[str]:
    """One row for each model, one column for each length: the share found, then the same by depth."""

    def cell(model: Mapping[str, Any], length: int) -> str:
        cells = [cell for cell in scores.row(model, length) if cell]
        if not cells:
            return "–"
        share, low, high = pooled(cells)
        depths = " ".join(percent(cell["share"]) for cell in cells)
        return f"**{percent(share)}** ({percent(low)}–{percent(high)}): {depths}"

    rows = [[model["name"], *(cell(model, length) for length in scores.lengths)] for model in scores.models]
    yield from _table((f"{scores.task}, %", *(f"{length} tokens" for length in scores.lengths)), rows)


def _cost(row: Mapping[str, Any]) -> list[str]:
    inside = row["inside"] and {"difference": row["inside"]["loss"], **row["inside"]}
    ratios = [f"× {ratio:.2f}" if ratio else "–" for ratio in (row["time"], row["memory"])]
    points = signed(row["against"], 0, 100), signed(row["beyond"], 3), signed(inside, 3)
    return [row["name"], *points, *ratios, ", ".join(engines_of(row))]


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(map(in_markdown, headings))} |", "|---" * len(headings) + "|"]
    return lines + [f"| {' | '.join(map(in_markdown, row))} |" for row in rows]


def bench(report: Report) -> str:
    """One line of JSON for each method, to be put beside those of other devices and models."""
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
