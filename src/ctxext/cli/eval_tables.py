"""The tables of `ctxext eval`: models by lengths with a figure for each depth, in colour and in digits."""

from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ctxext.evaluate.report.colours import hexadecimal, ink, shade
from ctxext.evaluate.report.findings import percent, pooled
from ctxext.evaluate.report.report import Report
from ctxext.evaluate.report.summary import effective_text

_CELL = 5
_POOLED = 13
_MAX_NAME = 32


def report_tables(report: Report, width: int) -> Iterator[RenderableType]:
    """Everything a report holds, as tables for a terminal of a width."""
    models = report["models"]
    for task in dict.fromkeys(cell["task"] for model in models for cell in model["cells"]):
        yield from _maps(models, task, width)
    if any(model.get("effective") for model in models):
        yield Text()
        yield _effective(models)
    tables = {"perplexity": _perplexity, "short": _short, "harness": _harness}
    for kind, make in tables.items():
        if any(model[kind] for model in models):
            yield Text()
            yield make(report)


def _maps(models: Sequence[dict[str, Any]], task: str, width: int) -> Iterator[Text]:
    """Lengths side by side, as many as fit, then the next ones below."""
    asked = [model for model in models if any(cell["task"] == task for cell in model["cells"])]
    cells = [cell for model in asked for cell in model["cells"] if cell["task"] == task]
    lengths, depths = (
        sorted({cell["length"] for cell in cells}),
        sorted({cell["depth"] for cell in cells}, key=lambda depth: depth or 0.0),
    )
    names = min(_MAX_NAME, max(len(model["name"]) for model in asked) + 2)
    block = _CELL * len(depths) + _POOLED + 2
    side_by_side = max(1, (width - max(names, 12)) // block)
    for first in range(0, len(lengths), side_by_side):
        shown = lengths[first : first + side_by_side]
        yield _map(asked, task, shown, depths, max(names, 12))


def _map(
    models: Sequence[dict[str, Any]], task: str, lengths: Sequence[int], depths: Sequence[float | None], names: int
) -> Text:
    block = _CELL * len(depths) + _POOLED + 2
    text = Text(f"\n{task:<{names}}", style="bold")
    text.append(
        "".join(f"{f'{length} tokens':^{_CELL * len(depths)}}{'':{_POOLED + 2}}" for length in lengths).rstrip()
    )
    heading = "".join(f"{'any' if depth is None else round(100 * depth):>{_CELL - 1}} " for depth in depths)
    text.append(f"\n{'depth %':<{names}}" + "".join(f"{f'{heading} all':<{block}}" for _ in lengths).rstrip(), "dim")
    for model in models:
        text.append(f"\n{_cut(model['name'], names):<{names}}", "not bold")
        for length in lengths:
            own = {c["depth"]: c for c in model["cells"] if c["task"] == task and c["length"] == length}
            for depth in depths:
                text.append_text(_cell(own.get(depth)))
            text.append(f" {_pooled(own):<{_POOLED + 1}}", "not bold")
    text.rstrip()
    return text


def _cell(cell: dict[str, Any] | None) -> Text:
    if cell is None:
        return Text(f"{'–':>{_CELL - 1}} ", "dim")
    colour = shade(cell["share"])
    return Text(f"{percent(cell['share']):>{_CELL - 1}} ", f"not bold {ink(colour)} on {hexadecimal(colour)}")


def _pooled(cells: dict[float | None, dict[str, Any]]) -> str:
    if not cells:
        return ""
    share, low, high = pooled(list(cells.values()))
    return f"{percent(share):>3} ({percent(low)}–{percent(high)})"


def _cut(name: str, width: int) -> str:
    return name if len(name) < width else "…" + name[-(width - 2) :]


def _effective(models: Sequence[dict[str, Any]]) -> Table:
    """Up to which length each model keeps most of what it does at the shortest."""
    longest = max(cell["length"] for model in models for cell in model["cells"])
    tasks = list(dict.fromkeys(cell["task"] for model in models for cell in model["cells"]))
    table = _table("effective length", *(["all"] if len(tasks) > 1 else []), *tasks)
    for model in models:
        found = model.get("effective")
        if found:
            own = [found] if len(tasks) > 1 else []
            own += [found["tasks"].get(task, {"length": None}) for task in tasks]
            table.add_row(model["name"], *(effective_text(one, longest) for one in own))
    return table


def _perplexity(report: Report) -> Table:
    measured, stride = [model for model in report["models"] if model["perplexity"]], report["settings"]["stride"]
    lengths = sorted({int(length) for model in measured for length in model["perplexity"]["lengths"]})
    table = _table(
        measured[0]["perplexity"].get("task", "perplexity"), "documents", *(f"{length} tokens" for length in lengths)
    )
    kinds = [("lengths", "")] + ([("sliding", f" (sliding, stride {stride})")] if stride else [])
    for model in measured:
        for kind, note in kinds:
            figures = model["perplexity"][kind]
            shown = [f"{figures[str(n)]['perplexity']:.2f}" if str(n) in figures else "–" for n in lengths]
            table.add_row(model["name"] + note, str(model["perplexity"]["documents"]), *shown)
    return table


def _short(report: Report) -> Table:
    table = _table("short", "tokens", "documents", "perplexity", "loss against source")
    for model in report["models"]:
        short = model["short"]
        if short:
            against = short.get("against")
            change = f"{against['loss']:+.4f} (× {against['ratio']:.3f}, {against['model']})" if against else "–"
            table.add_row(
                model["name"], str(short["length"]), str(short["documents"]), f"{short['perplexity']:.3f}", change
            )
    return table


def _harness(report: Report) -> Table:
    table = _table("harness", "task", "metric", "value")
    for model in report["models"]:
        for task, metrics in (model["harness"] or {}).items():
            for metric, value in metrics.items():
                table.add_row(model["name"], task, metric, f"{value:.4f}")
    return table


def _table(name: str, *columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column(Text(name, style="bold not dim"))
    for column in columns:
        table.add_column(column, justify="right")
    return table
