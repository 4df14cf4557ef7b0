"""The tables of `ctxext eval` in the terminal: models by lengths, with a coloured score for each depth."""

from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from ctxext.evaluate.report import tables
from ctxext.evaluate.report.colours import hexadecimal, ink, shade
from ctxext.evaluate.report.findings import format_percent
from ctxext.evaluate.report.report import HeatMap, Report, heat_map, tasks_of

_CELL = 5
_POOLED = 13
_MAX_NAME = 32


def report_tables(report: Report, width: int) -> Iterator[RenderableType]:
    """Yield the report as tables for a terminal of this width."""
    models = report["models"]
    yield from heat_maps(report, width)
    if any(model.get("effective") or model.get("ruler") for model in models):
        yield Text()
        yield from _tabulate_effective(report, width)
    key_tokens = ("tokens", "loss on key tokens", "key tokens", "of", "documents")
    for table in (
        _tabulate_perplexity(report),
        tables.Table("longppl", key_tokens, tables.key_token_rows(report)),
        _tabulate_short(report),
        tables.Table("harness", ("task", "metric", "value"), tables.harness_rows(models)),
    ):
        if table.rows:
            yield Text()
            yield results_table(table)


def heat_maps(report: Report, width: int) -> Iterator[Text]:
    """Yield the scores of each task by length and depth, with as many lengths side by side as fit."""
    models = report["models"]
    for task in tasks_of(report):
        scores = heat_map(models, task)
        longest = max(len(name) for name in (task, *(model["name"] for model in scores.models)))
        names = max(12, min(_MAX_NAME, longest + 2))
        side_by_side = max(1, (width - names) // (_CELL * len(scores.depths) + _POOLED + 2))
        for first in range(0, len(scores.lengths), side_by_side):
            yield _map(scores, scores.lengths[first : first + side_by_side], names)


def _map(scores: HeatMap, lengths: Sequence[int], names: int) -> Text:
    columns = _CELL * len(scores.depths)
    block = columns + _POOLED + 2
    text = Text(f"\n{scores.task:<{names}}", style="bold")
    text.append("".join(f"{f'{length} tokens':^{columns}}{'':{_POOLED + 2}}" for length in lengths).rstrip())
    heading = "".join(f"{'any' if depth is None else round(100 * depth):>{_CELL - 1}} " for depth in scores.depths)
    text.append(f"\n{'depth %':<{names}}" + "".join(f"{f'{heading} all':<{block}}" for _ in lengths).rstrip(), "dim")
    for model in scores.models:
        text.append(f"\n{_cut(model['name'], names):<{names}}", "not bold")
        for length in lengths:
            cells = scores.row(model, length)
            for cell in cells:
                text.append_text(_cell(cell))
            share, interval = tables.in_percent([cell for cell in cells if cell])
            shown = f"{share:>3} ({interval})" if any(cells) else ""
            text.append(f" {shown:<{_POOLED + 1}}", "not bold")
    text.rstrip()
    return text


def _cell(cell: dict[str, Any] | None) -> Text:
    if cell is None:
        return Text(f"{'–':>{_CELL - 1}} ", "dim")
    colour = shade(cell["share"])
    return Text(f"{format_percent(cell['share']):>{_CELL - 1}} ", f"not bold {ink(colour)} on {hexadecimal(colour)}")


def _cut(name: str, width: int) -> str:
    return name if len(name) < width else "…" + name[-(width - 2) :]


def _tabulate_effective(report: Report, width: int) -> Iterator[RichTable]:
    """Yield each model's effective length, overall and per task, with as many columns side by side as fit."""
    models, tasks = report["models"], tasks_of(report)
    longest = max(cell["length"] for model in models for cell in model["cells"])
    shown = [model for model in models if model.get("effective") or model.get("ruler")]
    effective = [model.get("effective") or {"tasks": {}} for model in shown]
    columns = [("all", [entry if "length" in entry else None for entry in effective])] if len(tasks) > 1 else []
    columns += [(task, [entry["tasks"].get(task) for entry in effective]) for task in tasks]
    cells = [[heading, *(tables.effective_text(entry, longest) for entry in entries)] for heading, entries in columns]
    cells = cells if any(entry["tasks"] for entry in effective) else []
    if heading := tables.leaderboard_heading(shown):
        cells.insert(0, [heading, *(tables.leaderboard_text(model.get("ruler")) for model in shown)])
    names = ["effective length", *(_cut(model["name"], _MAX_NAME) for model in shown)]
    while cells:
        count = 1
        while count < len(cells) and sum(map(_width, [names, *cells[: count + 1]])) <= width:
            count += 1
        (title, *head), *rows = zip(names, *cells[:count], strict=True)
        yield results_table(tables.Table(title, head, rows))
        cells = cells[count:]


def _width(texts: Sequence[str]) -> int:
    """Return the width of a column, including the space after it."""
    return max(map(len, texts)) + 2


def _tabulate_perplexity(report: Report) -> tables.Table:
    (task, lengths, curves), rows = tables.perplexities(report), []
    stride = report["settings"].get("stride")
    kinds = {"lengths": ""}
    if any("sliding" in curve for *_, curve in curves):  # Masked tokens are evaluated without windows.
        kinds["sliding"] = f" (sliding, stride {stride})"
    for model, text, curve in curves:
        for kind, note in kinds.items():
            name = f"  {text}" if text else model["name"]
            rows.append([name + note, str(curve["documents"]), *tables.figures(curve[kind], lengths)])
    return tables.Table(task, ("documents", *(f"{length} tokens" for length in lengths)), rows)


def _tabulate_short(report: Report) -> tables.Table:
    rows = []
    for model in report["models"]:
        if result := model["short"]:
            change, against = tables.change_in_loss(result)[0] or "–", result.get("against")
            change += f" (× {against['ratio']:.3f}, {against['model']})" if against else ""
            figures = [str(result["length"]), str(result["documents"]), f"{result['perplexity']:.3f}", change]
            rows.append([model["name"], *figures])
    return tables.Table("short", ("tokens", "documents", "perplexity", "loss against source"), rows)


def results_table(table: tables.Table, *, no_wrap: bool = False, strong: str | None = None) -> RichTable:
    """Return a table without rules: names on the left, figures on the right, and the row `strong` in bold."""
    shown = RichTable(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    shown.add_column(Text(table.title, style="bold not dim"), no_wrap=no_wrap)
    for column in table.head:
        shown.add_column(column, justify="right", no_wrap=no_wrap)
    for row in table.rows:
        shown.add_row(*row, style="bold" if row[0] == strong else "")
    return shown
