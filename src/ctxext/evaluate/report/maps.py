"""The maps of the page: right answers by depth for every model, one map for each length, as cells with figures."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from ctxext.evaluate.report.findings import percent, pooled
from ctxext.evaluate.report.html import share_cell, table
from ctxext.evaluate.report.report import Report
from ctxext.evaluate.report.summary import effective_text, lengths_of
from ctxext.evaluate.tasks.registry import RETRIEVAL_TASKS


def maps(report: Report, task: str, short: Mapping[str, str]) -> str:
    """The section of one task.

    Args:
        report: The content of report.json.
        task: Which.
        short: The models' short names.
    """
    models = report["models"]
    kind = RETRIEVAL_TASKS.get(task)
    is_written = report["settings"]["generate"] or (kind is not None and kind.is_written)
    answered = "Each answer was generated" if is_written else kind.scored if kind else "Exact match"
    lengths = lengths_of(models, task)
    found = "".join(_map(models, task, length, short) for length in lengths)
    return f"""<h2>{escape(task)}</h2>
<p>{escape(kind.description if kind else "")}</p>
<p class="soft">Percent right by depth and prompt length. {answered}. Lengths that are longer than a model was trained
for are marked with * at its name.</p>
<div class="maps">{found}</div>
{_effective(models, task, lengths, short)}
<details><summary>Counts and intervals</summary>{_counts(models, task, short)}</details>"""


def _map(models: Sequence[dict[str, Any]], task: str, length: int, short: Mapping[str, str]) -> str:
    rows, depths = [], list[float | None]()
    for model in models:
        own = [cell for cell in model["cells"] if cell["task"] == task and cell["length"] == length]
        if own:
            depths = [cell["depth"] for cell in own]
            share, low, high = pooled(own)
            cells = "".join(share_cell(cell["share"]) for cell in own)
            beyond = "*" if model["trained_length"] and length > model["trained_length"] else ""
            rows.append(
                f'<tr><th scope="row">{escape(short[model["name"]])}{beyond}</th>{cells}'
                f'<td class="all"><b>{percent(share)}</b> ({percent(low)}–{percent(high)})</td></tr>'
            )
    head = "".join(f"<th>{'anywhere' if depth is None else round(100 * depth)}</th>" for depth in depths)
    return (
        f'<table class="map" style="--cells:{len(depths)}"><caption>{length} tokens</caption>'
        f'<thead><tr><th>depth %</th>{head}<th class="all">all</th></tr></thead><tbody>{"".join(rows)}</tbody></table>'
    )


def _effective(models: Sequence[dict[str, Any]], task: str, lengths: Sequence[int], short: Mapping[str, str]) -> str:
    found = {
        short[model["name"]]: model["effective"]["tasks"][task]
        for model in models
        if (model.get("effective") or {}).get("tasks", {}).get(task)
    }
    if not found:
        return ""
    told = "; ".join(f"{escape(name)} {effective_text(own, lengths[-1])}" for name, own in found.items())
    return f"<p>Effective length: {told}.</p>"


def _counts(models: Sequence[dict[str, Any]], task: str, short: Mapping[str, str]) -> str:
    rows = [
        [
            escape(short[model["name"]]),
            cell["length"],
            "–" if cell["depth"] is None else f"{100 * cell['depth']:g} %",
            f"{cell['correct']:g} of {cell['samples']}",
            f"{100 * cell['share']:.1f} %",
            f"{100 * cell['low']:.1f}–{100 * cell['high']:.1f} %",
        ]
        for model in models
        for cell in model["cells"]
        if cell["task"] == task
    ]
    return table(["model", "tokens", "depth", "right", "share", "95 % interval"], rows)
