"""A comparison as Markdown, for a page of results or an issue."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ctxext.converters.engines import EXACT, PARTLY
from ctxext.evaluate.report.findings import percent, pooled
from ctxext.evaluate.report.report import HeatMap, Report, heat_map
from ctxext.files.strict import in_markdown

PAGE = "comparison.md"
"""The file beside report.json."""


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
            [row["name"], *(_signed(row["beyond_by_text"].get(text), 3) for text in texts)]
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
    engines = [served["engine"] for served in row["serving"] if served["status"] in (EXACT, PARTLY)]
    ratios = [f"× {ratio:.2f}" if ratio else "–" for ratio in (row["time"], row["memory"])]
    points = _signed(row["against"], 0, 100), _signed(row["beyond"], 3), _signed(inside, 3)
    return [row["name"], *points, *ratios, ", ".join(engines)]


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(map(in_markdown, headings))} |", "|---" * len(headings) + "|"]
    return lines + [f"| {' | '.join(map(in_markdown, row))} |" for row in rows]


def _signed(difference: Mapping[str, Any] | None, decimals: int, times: int = 1) -> str:
    """A difference with its interval, in units of which `times` make one."""
    if not difference:
        return "–"
    text = f"{times * difference['difference']:+z.{decimals}f}"
    if difference["low"] is None:
        return text
    return f"{text} ({times * difference['low']:+z.{decimals}f} to {times * difference['high']:+z.{decimals}f})"
