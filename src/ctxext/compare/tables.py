"""The rows of a comparison's tables, for the terminal and for Markdown."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ctxext.compare.verdict import engines_of, inside_of
from ctxext.report.findings import format_percent
from ctxext.report.report import HeatMap
from ctxext.report.tables import Table, score_at


class Format(Protocol):
    """Formats a difference with its confidence interval, as `format_difference` does."""

    def __call__(self, difference: Mapping[str, Any] | None, decimals: int = 3, times: int = 1) -> str:
        """Format a difference, multiplied by `times`, with some decimals."""
        ...


def tabulate_scores(scores: HeatMap) -> Table:
    """Tabulate models by lengths; each cell contains the share found, in total and by depth."""

    def cell(model: Mapping[str, Any], length: int) -> str:
        cells, share, interval = score_at(scores, model, length)
        depths = " ".join(format_percent(cell["share"]) for cell in cells if cell)
        return f"**{share}** ({interval}): {depths}" if share else "–"

    rows = [[model["name"], *(cell(model, length) for length in scores.lengths)] for model in scores.models]
    return Table(scores.task, [f"{scores.task}, %", *(f"{length} tokens" for length in scores.lengths)], rows)


def tabulate_costs(rows: Sequence[Mapping[str, Any]], format_change: Format) -> Table:
    """Tabulate the answers, the losses, the time and the memory of each method against the unmodified model."""
    head = ["method", "found, points", "loss beyond", "cost inside", "time", "memory", "served in"]
    return Table("method", head, [_list_costs(row, format_change) for row in rows])


def _list_costs(row: Mapping[str, Any], format_change: Format) -> list[str]:
    if "against" not in row:  # The unmodified model.
        loss = f"{row['loss_beyond']:.3f}" if row["loss_beyond"] is not None else "–"
        return [row["name"], "", loss, "", "", f"{row['peak'] / 1e9:.1f} GB" if row["peak"] else "", ""]
    points = format_change(row["against"], 0, 100)
    losses = [format_change(row["beyond"]), format_change(inside_of(row))]
    ratios = [f"× {ratio:.2f}" if ratio else "–" for ratio in (row["time"], row["memory"])]
    return [row["name"], points, *losses, *ratios, ", ".join(engines_of(row))]


def tabulate_losses(rows: Sequence[Mapping[str, Any]], format_change: Format) -> Table:
    """Tabulate the losses on each kind of text. The table is empty without such losses."""
    measured = [row for row in rows if row.get("beyond_by_text")]
    texts = list(dict.fromkeys(text for row in measured for text in row["beyond_by_text"]))
    cells = [[row["name"], *(format_change(row["beyond_by_text"].get(text)) for text in texts)] for row in measured]
    return Table("loss beyond", ["loss beyond, change", *texts], cells)
