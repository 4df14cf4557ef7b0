"""The tables of `ctxext eval` in the terminal: models by lengths, with a coloured score for each depth."""

from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ctxext.evaluate.report.colours import hexadecimal, ink, shade
from ctxext.evaluate.report.findings import effective_text, harness_rows, key_token_rows, percent, pooled
from ctxext.evaluate.report.report import HeatMap, Report, heat_map

_CELL = 5
_POOLED = 13
_MAX_NAME = 32


def report_tables(report: Report, width: int) -> Iterator[RenderableType]:
    """The whole report as tables for a terminal of a given width."""
    models = report["models"]
    yield from heat_maps(report, width)
    if any(model.get("effective") for model in models):
        yield Text()
        yield from _effective(models, width)
    headings = ("tokens", "loss on key tokens", "key tokens", "of", "documents")
    for table in (
        _perplexity(report),
        results_table("longppl", *headings, rows=key_token_rows(report)),
        _short(report),
        results_table("harness", "task", "metric", "value", rows=harness_rows(report)),
    ):
        if table.row_count:
            yield Text()
            yield table


def heat_maps(report: Report, width: int) -> Iterator[Text]:
    """The scores by length and depth, task after task: as many lengths side by side as fit, and the others below."""
    models = report["models"]
    for task in dict.fromkeys(cell["task"] for model in models for cell in model["cells"]):
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
            share, low, high = pooled([cell for cell in cells if cell])
            shown = f"{percent(share):>3} ({percent(low)}–{percent(high)})" if any(cells) else ""
            text.append(f" {shown:<{_POOLED + 1}}", "not bold")
    text.rstrip()
    return text


def _cell(cell: dict[str, Any] | None) -> Text:
    if cell is None:
        return Text(f"{'–':>{_CELL - 1}} ", "dim")
    colour = shade(cell["share"])
    return Text(f"{percent(cell['share']):>{_CELL - 1}} ", f"not bold {ink(colour)} on {hexadecimal(colour)}")


def _cut(name: str, width: int) -> str:
    return name if len(name) < width else "…" + name[-(width - 2) :]


def _effective(models: Sequence[dict[str, Any]], width: int) -> Iterator[Table]:
    """The effective length of each model, over all tasks and of each: as many side by side as fit, the others below."""
    longest = max(cell["length"] for model in models for cell in model["cells"])
    tasks = list(dict.fromkeys(cell["task"] for model in models for cell in model["cells"]))
    shown = [model for model in models if model.get("effective")]
    columns = [("all", [model["effective"] for model in shown])] if len(tasks) > 1 else []
    columns += [(task, [model["effective"]["tasks"].get(task) for model in shown]) for task in tasks]
    cells = [[heading, *(effective_text(entry, longest) for entry in entries)] for heading, entries in columns]
    names = [_cut(model["name"], _MAX_NAME) for model in shown]
    room = width - _width(["effective length", *names])
    while cells:
        used, count = 0, 0
        while count < len(cells) and (not count or used + _width(cells[count]) <= room):
            used, count = used + _width(cells[count]), count + 1
        headings, *rows = zip(*cells[:count], strict=True)
        yield results_table(
            "effective length", *headings, rows=[[name, *row] for name, row in zip(names, rows, strict=True)]
        )
        cells = cells[count:]


def _width(texts: Sequence[str]) -> int:
    """The width of a column with the space behind it."""
    return max(map(len, texts)) + 2


def _perplexity(report: Report) -> Table:
    measured, stride = [model for model in report["models"] if model["perplexity"]], report["settings"].get("stride")
    lengths = sorted({int(length) for model in measured for length in model["perplexity"]["lengths"]})
    name = next((model["perplexity"].get("task") for model in measured), None) or "perplexity"
    table = results_table(name, "documents", *(f"{length} tokens" for length in lengths))
    kinds = [("lengths", "")] + ([("sliding", f" (sliding, stride {stride})")] if stride else [])
    for model in measured:
        for text, curve in {"": model["perplexity"], **model["perplexity"].get("texts", {})}.items():
            for kind, note in kinds:
                shown = [f"{curve[kind][str(n)]['perplexity']:.2f}" if str(n) in curve[kind] else "–" for n in lengths]
                table.add_row(f"  {text}{note}" if text else model["name"] + note, str(curve["documents"]), *shown)
    return table


def _short(report: Report) -> Table:
    table = results_table("short", "tokens", "documents", "perplexity", "loss against source")
    for model in report["models"]:
        short = model["short"]
        if short:
            against = short.get("against")
            change = f"{against['loss']:+z.4f} (× {against['ratio']:.3f}, {against['model']})" if against else "–"
            table.add_row(
                model["name"], str(short["length"]), str(short["documents"]), f"{short['perplexity']:.3f}", change
            )
    return table


def results_table(name: str, *columns: str, no_wrap: bool = False, rows: Sequence[Sequence[str]] = ()) -> Table:
    """Return a table without lines: names on the left, figures on the right."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column(Text(name, style="bold not dim"), no_wrap=no_wrap)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=no_wrap)
    for row in rows:
        table.add_row(*row)
    return table
