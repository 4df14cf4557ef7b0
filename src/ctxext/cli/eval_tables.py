"""The tables of `ctxext eval` in the terminal: models by lengths, with a coloured score for each depth."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from rich.console import RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from ctxext.report import tables
from ctxext.report.colours import hexadecimal, ink, shade
from ctxext.report.findings import format_percent
from ctxext.report.report import HeatMap, Report, heat_map, tasks_of

_CELL = 5
_POOLED = 13
_MAX_NAME = 32


def report_tables(report: Report, width: int) -> Iterator[RenderableType]:
    """Yield the report as tables for a terminal of this width."""
    yield from heat_maps(report, width)
    effective = tables.tabulate_effective_lengths(report, has_leaderboard=True)
    short = ("model", "tokens", "documents", "perplexity", "loss against source")
    if effective.rows:
        yield Text()
        yield from map(results_table, _split(effective, width))
    for table in (
        *(tables.tabulate_groups(heat_map(report["models"], task)) for task in tasks_of(report)),
        _perplexity_table(report),
        tables.tabulate_key_tokens(report),
        tables.tabulate_original_length(report).select(short),
        tables.tabulate_harness(report["models"]),
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
            cells, share, interval = tables.score_at(scores, model, length)
            for cell in cells:
                text.append_text(_cell(cell))
            shown = f"{share:>3} ({interval})" if share else ""
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


def _split(table: tables.Table, width: int) -> Iterator[tables.Table]:
    """Yield parts of a table, each with the names of the models and as many columns as fit."""
    cut = ([_cut(name, _MAX_NAME), *cells] for name, *cells in table.rows)
    first, *columns = zip((table.title, *table.head[1:]), *cut, strict=True)
    while columns:
        count = 1
        while count < len(columns) and sum(map(_width, [first, *columns[: count + 1]])) <= width:
            count += 1
        head, *rows = zip(first, *columns[:count], strict=True)
        yield replace(table, head=head, rows=rows)
        columns = columns[count:]


def _width(texts: Sequence[str]) -> int:
    """Return the width of a column, including the space after it."""
    return max(map(len, texts)) + 2


def _perplexity_table(report: Report) -> tables.Table:
    """Return the table of perplexity, with the columns of sliding windows as rows."""
    table, stride = tables.tabulate_perplexity(report), report["settings"].get("stride")
    head = [column for column in table.head if column != "text" and not column.endswith(", sliding")]
    rows = []
    for model, text, documents, *cells in table.rows:
        name = f"  {text}" if text else model
        for kind in ("", f" (sliding, stride {stride})"):
            if cells:
                rows.append([name + kind, documents, *cells[: len(head) - 2]])
                cells = cells[len(head) - 2 :]
    return tables.Table(table.title, head, rows)


def results_table(table: tables.Table, *, no_wrap: bool = False, strong: str | None = None) -> RichTable:
    """Return a table without rules: names on the left, figures on the right, and the row `strong` in bold."""
    shown = RichTable(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    shown.add_column(Text(table.title, style="bold not dim"), no_wrap=no_wrap)
    for column in table.head[1:]:
        shown.add_column(column, justify="right", no_wrap=no_wrap)
    for row in table.rows:
        shown.add_row(*row, style="bold" if row[0] == strong else "")
    return shown
