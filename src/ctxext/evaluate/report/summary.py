"""The first table of the page: every model by prompt length, its effective length, and what it costs inside."""

from collections.abc import Mapping, Sequence
from typing import Any

from ctxext.evaluate.report.findings import percent, pooled
from ctxext.evaluate.report.html import model_name
from ctxext.evaluate.report.report import Report
from ctxext.recipes.length import format_length


def summary(report: Report, short: Mapping[str, str]) -> str:
    """The table with a line to filter it; empty where no task was asked.

    Args:
        report: The content of report.json.
        short: The models' short names.
    """
    models = [model for model in report["models"] if model["cells"]]
    if not models:
        return ""
    tasks = list(dict.fromkeys(cell["task"] for model in models for cell in model["cells"]))
    lengths = sorted({cell["length"] for model in models for cell in model["cells"]})
    costs = {model["name"]: (model["short"] or {}).get("against") for model in models}
    has_costs, has_effective = any(costs.values()), len(lengths) > 1
    head = ["model", *(f"{format_length(length)} tokens" for length in lengths)]
    head += ["effective length"] * has_effective + ["cost inside, nats"] * has_costs
    figures = {model["name"]: {length: _pooled(model, length) for length in lengths} for model in models}
    best = {length: max((own[length] or (-1.0,))[0] for own in figures.values()) for length in lengths}
    rows = []
    for model in models:
        own = figures[model["name"]]
        cells = [_header(model["name"], short)]
        cells += [
            _share(own[length], is_best=bool(own[length]) and own[length][0] == best[length]) for length in lengths
        ]
        if has_effective:
            cells.append(_effective(model, lengths[-1]))
        if has_costs:
            cells.append(_cost(costs[model["name"]]))
        rows.append(f"<tr>{''.join(cells)}</tr>")
    told = f"the mean of {', '.join(tasks)}" if len(tasks) > 1 else tasks[0]
    return f"""<h2>Summary</h2>
<p class="soft">Percent right: {told}, with the 95 % interval (Wilson); the best of each length is bold. Effective
length: up to which a model keeps 85 % of its own figure at {format_length(lengths[0])} tokens. Cost inside: loss
inside the original context length against the model it was made from. A click on a head sorts.</p>
<p><input type="search" id="filter" placeholder="Filter models" aria-label="Filter models"></p>
<div class="wide"><table class="summary" id="summary">
<thead><tr>{"".join(f'<th scope="col"><button type="button">{cell}</button></th>' for cell in head)}</tr></thead>
<tbody>{"".join(rows)}</tbody></table></div>"""


def _pooled(model: Mapping[str, Any], length: int) -> Any:
    cells = [cell for cell in model["cells"] if cell["length"] == length]
    return pooled(cells) if cells else None


def _header(name: str, short: Mapping[str, str]) -> str:
    return f'<th scope="row" data-value="{_attribute(name)}">{model_name(name, short)}</th>'


def _attribute(text: str) -> str:
    from html import escape

    return escape(text, quote=True)


def _share(figure: Any, *, is_best: bool) -> str:
    if figure is None:
        return '<td data-value="-1">–</td>'
    share, low, high = figure
    shown = f"<b>{percent(share)}</b>" if is_best else percent(share)
    return f'<td data-value="{share:.6f}">{shown} <span class="soft">({percent(low)}–{percent(high)})</span></td>'


def _effective(model: Mapping[str, Any], longest: int) -> str:
    found = model.get("effective")
    if not found or found["length"] is None:
        return '<td data-value="0">–</td>'
    return f'<td data-value="{found["length"]}">{effective_text(found, longest)}</td>'


def effective_text(found: Mapping[str, Any], longest: int) -> str:
    """An effective length in words, with its interval where that is not the length itself."""
    if found["length"] is None:
        return "–"
    marked = "≥ " if found["length"] == longest else ""
    text = f"{marked}{format_length(found['length'])}"
    if found["low"] == found["high"] == found["length"]:
        return text
    return f"{text} ({format_length(found['low'])}–{format_length(found['high'])})"


def _cost(against: Mapping[str, Any] | None) -> str:
    if not against:
        return '<td data-value="0">–</td>'
    return f'<td data-value="{against["loss"]:.6f}">{against["loss"]:+.3f}</td>'


def lengths_of(models: Sequence[Mapping[str, Any]], task: str) -> list[int]:
    """The lengths at which a task was asked."""
    return sorted({cell["length"] for model in models for cell in model["cells"] if cell["task"] == task})
