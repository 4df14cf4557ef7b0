"""The rows of every table of results. The page, the model card and the terminal select columns and render them."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ctxext.files.length import format_length
from ctxext.files.strict import in_markdown
from ctxext.report.findings import format_interval, format_percent, pool_cells
from ctxext.report.intervals import share_interval
from ctxext.report.report import HeatMap, Report, tasks_of, texts_of
from ctxext.tasks.longppl import WINDOW


class Cell(NamedTuple):
    """A cell with more than its text.

    Attributes:
        text: The text.
        value: The sort value of its column; empty if unmeasured.
        note: A confidence interval, or the full name of a model.
        style: "best" if significantly better than all other cells, "name" or "code"; else empty.
    """

    text: str
    value: Any = ""
    note: str = ""
    style: str = ""


@dataclass(frozen=True)
class Table:
    """A table, to be rendered as HTML, as Markdown or in a terminal.

    Attributes:
        title: The title; in a terminal the heading of the first column.
        head: The headings of the columns.
        rows: The cells.
        note: A paragraph above the table.
    """

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[Any]]
    note: str = ""

    def select(self, columns: Sequence[str], title: str | None = None, note: str = "") -> "Table":
        """Return some of the columns, with another title and a note if given."""
        places = [self.head.index(column) for column in columns]
        rows = [[row[place] for place in places] for row in self.rows]
        return Table(self.title if title is None else title, columns, rows, note)

    def as_markdown(self, rule: str = "") -> str:
        """Format the head and the rows as Markdown, with a rule between them that aligns the columns."""
        head, *rows = (f"| {' | '.join(map(in_markdown, line))} |" for line in (self.head, *self.rows))
        return "\n".join([head, rule or "|---" * len(self.head) + "|", *rows])


def in_percent(cells: Sequence[dict[str, Any]]) -> tuple[str, str]:
    """Format the share of correct answers over several cells, and its 95 % interval."""
    share, low, high = pool_cells(cells)
    return format_percent(share), format_interval(low, high)


def score_at(scores: HeatMap, model: Mapping[str, Any], length: int) -> tuple[list[dict[str, Any] | None], str, str]:
    """Return a model's cells at a length by depth, and its share over all depths with the interval.

    The share and the interval are empty if nothing was measured.
    """
    cells = scores.row(model, length)
    measured = [cell for cell in cells if cell]
    return cells, *(in_percent(measured) if measured else ("", ""))


def tabulate_retrieval(scores: HeatMap) -> Table:
    """Tabulate the correct answers of a task by model and length, pooled over depths, with the weakest depth."""
    rows = []
    for model in scores.models:
        for length in scores.lengths:
            cells, share, interval = score_at(scores, model, length)
            if measured := [cell for cell in cells if cell]:
                weakest = min(measured, key=lambda cell: cell["share"])
                is_even = weakest["depth"] is None or weakest["share"] == pool_cells(measured)[0]
                place = "" if is_even else f"{format_percent(weakest['share'])} at depth {100 * weakest['depth']:.0f} %"
                rows.append([model["name"], str(length), share, interval, place])
    return Table(scores.task, ["model", "tokens", "% correct", "95 % interval", "% correct at the weakest depth"], rows)


def tabulate_counts(scores: HeatMap) -> Table:
    """Tabulate the counts of a task for each model, length and depth."""
    rows = [
        [
            name,
            cell["length"],
            "–" if cell["depth"] is None else f"{100 * cell['depth']:g} %",
            f"{cell['correct']:g} of {cell['samples']}",
            f"{100 * cell['share']:.1f} %",
            f"{100 * cell['low']:.1f}–{100 * cell['high']:.1f} %",
        ]
        for (name, _, _), cell in scores.cells.items()
    ]
    return Table("", ["model", "tokens", "depth", "correct", "share", "95 % interval"], rows)


def tabulate_groups(scores: HeatMap) -> Table:
    """Tabulate the correct answers in each group of questions by length, with the models of a group adjacent."""
    rows = []
    for length in scores.lengths:
        rows_by_name = {model["name"]: scores.row(model, length) for model in scores.models}
        measured = {name: [cell for cell in row if cell] for name, row in rows_by_name.items() if any(row)}
        groups = dict.fromkeys(
            group for cells in measured.values() for cell in cells for group in cell.get("groups", {})
        )
        for group, (name, cells) in itertools.product(groups, measured.items()):
            texts = texts_of([{**cell, "texts": cell["groups"][group]} for cell in cells])
            correct, samples = math.fsum(right for right, _ in texts), sum(count for _, count in texts)
            low, high = share_interval(texts)
            share = f"{100 * correct / samples:.1f} %" if samples else "–"
            interval = f"{100 * low:.1f}–{100 * high:.1f} %" if samples else "–"
            rows.append([name, str(length), group, f"{correct:g} of {samples}", share, interval])
    return Table(scores.task, ["model", "tokens", "questions", "correct", "share", "95 % interval"], rows)


def tabulate_summary(report: Report) -> Table:
    """Tabulate models by prompt length, pooled over tasks, with effective lengths and costs."""
    models = [model for model in report["models"] if model["cells"]]
    lengths = sorted({cell["length"] for model in models for cell in model["cells"]})
    heading = leaderboard_heading(models)
    costs = {model["name"]: (model["short"] or {}).get("against") for model in models}
    head = ["model", *(f"{format_length(length)} tokens" for length in lengths)]
    head += ["effective length"] * (len(lengths) > 1) + [heading] * bool(heading) + ["cost, nats"] * any(costs.values())
    rows = {model["name"]: [_name(model)] for model in models}
    for length in lengths:
        scores = {
            model["name"]: pool_cells(cells)
            for model in models
            if (cells := [cell for cell in model["cells"] if cell["length"] == length])
        }
        first, *others = sorted(scores.values(), reverse=True)
        has_best = bool(others) and first[1] > max(high for _, _, high in others)
        for name, row in rows.items():
            if (score := scores.get(name)) is None:
                row.append(Cell("–"))
            else:
                share, low, high = score
                style = "best" if has_best and score == first else ""
                row.append(Cell(format_percent(share), f"{share:.6f}", format_interval(low, high), style))
    for model in models:
        row, effective, ruler = rows[model["name"]], model.get("effective"), model.get("ruler")
        if len(lengths) > 1:
            row.append(Cell(effective_text(effective, lengths[-1]), _sort_length(effective)))
        if heading:
            row.append(Cell(leaderboard_text(ruler), _sort_length(ruler)))
        if any(costs.values()):
            cost = costs[model["name"]]
            row.append(Cell(f"{cost['loss']:+z.3f}", f"{cost['loss']:.6f}") if cost else Cell("–"))
    return Table("Summary", head, [*rows.values()])


def _sort_length(effective: Mapping[str, Any] | None) -> int | str:
    """Return the sort value of an effective length: 0 if there is none, empty if unmeasured."""
    return "" if effective is None or effective.get("scores") == {} else effective["length"] or 0


def _name(model: Mapping[str, Any]) -> Cell:
    """Return the cell of a model's name, with the full name as its note if they differ."""
    whole = model.get("whole", model["name"])
    return Cell(model["name"], whole, whole if whole != model["name"] else "", "name")


def tabulate_effective_lengths(report: Report, *, has_leaderboard: bool) -> Table:
    """Tabulate each model's effective length, overall and by task, and on request that of RULER's leaderboard."""
    keys = ("effective", "ruler") if has_leaderboard else ("effective",)
    models = [model for model in report["models"] if any(model.get(key) for key in keys)]
    tasks = tasks_of({"models": [model for model in models if model.get("effective")]})
    longest = max((cell["length"] for model in report["models"] for cell in model["cells"]), default=0)
    heading = leaderboard_heading(models) if has_leaderboard else ""
    rows = []
    for model in models:
        effective = model.get("effective")
        by_task = (effective or {}).get("tasks", {})
        shown = [effective] * (len(tasks) > 1) + [by_task.get(task) for task in tasks]
        row = [model["name"], *([leaderboard_text(model.get("ruler"))] if heading else [])]
        rows.append([*row, *(effective_text(entry, longest) for entry in shown)])
    head = ["model", *([heading] if heading else []), *["all"] * (len(tasks) > 1), *tasks]
    return Table("effective length", head, rows)


def effective_text(effective: Mapping[str, Any] | None, longest: int) -> str:
    """Format an effective length, with its interval if that contains more than one length.

    Args:
        effective: An entry of `effective` in report.json; None if unmeasured.
        longest: The longest prompt length, which is formatted with "≥".
    """
    if effective is None:
        return "–"
    length, low, high = (
        "none" if effective[key] is None else format_length(effective[key]) for key in ("length", "low", "high")
    )
    sign = "≥ " if effective["length"] == longest else ""
    return f"{sign}{length}" if low == high == length else f"{sign}{length} ({low}–{high})"


def tabulate_leaderboard(report: Report) -> Table:
    """Tabulate each model's effective length by RULER's leaderboard, with the score at each length."""
    models = [model for model in report["models"] if model.get("ruler")]
    lengths = sorted({int(length) for model in models for length in model["ruler"]["scores"]})
    rows = []
    for model in models:
        scores = {int(length): score for length, score in model["ruler"]["scores"].items()}
        shown = [f"{100 * scores[length]:.1f}" if length in scores else "–" for length in lengths]
        rows.append([model["name"], leaderboard_text(model["ruler"]), *shown])
    return Table("RULER", ["model", leaderboard_heading(models), *(f"{length} tokens" for length in lengths)], rows)


def leaderboard_text(ruler: Mapping[str, Any] | None) -> str:
    """Format an effective length of RULER's leaderboard, with "≥" at the longest length and "<" below the shortest.

    Args:
        ruler: The entry `ruler` of a model in report.json; None if unmeasured.
    """
    if ruler is None or not ruler["scores"]:
        return "–"
    shortest, longest = (find(map(int, ruler["scores"])) for find in (min, max))
    if ruler["length"] is None:
        return f"< {format_length(shortest)}"
    return f"{'≥ ' if ruler['length'] == longest else ''}{format_length(ruler['length'])}"


def leaderboard_heading(models: Sequence[Mapping[str, Any]]) -> str:
    """Return the heading of the leaderboard's effective lengths, with the number of tasks; empty if unmeasured."""
    numbers = {model["ruler"]["tasks"] for model in models if model.get("ruler")}
    return f"RULER ≥ 85.6 % ({max(numbers)} of 13 tasks)" if numbers else ""


def tabulate_perplexity(report: Report) -> Table:
    """Tabulate perplexity by length: a row for all texts of a model, then one for each kind of text by name.

    With sliding windows, each length has a second column.
    """
    models = [model for model in report["models"] if model["perplexity"]]
    task = next((str(model["perplexity"].get("task", "perplexity")) for model in models), "")
    lengths = sorted({int(length) for model in models for length in model["perplexity"]["lengths"]})
    curves = [
        (model["name"], text, curve)
        for model in models
        for text, curve in {"": model["perplexity"], **model["perplexity"].get("texts", {})}.items()
    ]
    kinds = {"lengths": ""}
    if any("sliding" in curve for *_, curve in curves):  # Masked tokens are evaluated without windows.
        kinds["sliding"] = ", sliding"
    rows = []
    for name, text, curve in curves:
        measured = [curve[kind].get(str(length)) for kind in kinds for length in lengths]
        shown = ["–" if figure is None else f"{figure['perplexity']:.2f}" for figure in measured]
        rows.append([name, text, str(curve["documents"]), *shown])
    heads = [f"{length} tokens{note}" for note in kinds.values() for length in lengths]
    return Table(task, ["model", "text", "documents", *heads], rows)


def tabulate_key_tokens(report: Report) -> Table:
    """Tabulate the loss on key tokens, with the numbers of key tokens, of all tokens and of documents."""
    rows = [
        [model["name"], length, f"{losses['loss']:.3f}" if losses["count"] else "–"]
        + [str(losses[key]) for key in ("count", "of", "documents")]
        for model in report["models"]
        for length, losses in (model.get("longppl") or {}).items()
    ]
    return Table("longppl", ["model", "tokens", "loss on key tokens", "key tokens", "of", "documents"], rows)


def describe_evaluator(report: Report) -> str:
    """Return a sentence about the evaluator of key tokens and its short context; empty for reports without it."""
    by_length = [losses for model in report["models"] for losses in (model.get("longppl") or {}).values()]
    finders = dict.fromkeys((losses["evaluator"], *losses["window"]) for losses in by_length if losses.get("window"))
    return "".join(
        f"Evaluator: {name}, with short contexts of {window} to {window + step - 1} tokens"
        f"{'' if window == WINDOW else f', as the texts are too short for {WINDOW}'}. "
        for name, window, step in finders
    )


def tabulate_original_length(report: Report) -> Table:
    """Tabulate perplexity at the original context length, and the change of the loss from the source."""
    rows = []
    for model in report["models"]:
        if measured := model["short"]:
            row = [model["name"], str(measured["length"]), str(measured["documents"]), f"{measured['perplexity']:.3f}"]
            if against := measured.get("against"):
                low, high = against["low"], against["high"]
                change, interval = f"{against['loss']:+z.4f}", "" if low is None else f"{low:+z.4f} to {high:+z.4f}"
                with_ratio = f"{change} (× {against['ratio']:.3f}, {against['model']})"
                row += [change, interval, f"{change} ({interval})" if interval else change, with_ratio]
                rows.append([*row, against["model"]])
            else:
                rows.append([*row, "", "", "–", "–", "–"])
    head = ["model", "tokens", "documents", "perplexity"]
    head += ["change in loss (nats per token)", "95 % interval"]
    head += ["loss against source, nats per token", "loss against source", "source"]
    return Table("short", head, rows)


def tabulate_harness(models: Sequence[Mapping[str, Any]]) -> Table:
    """Tabulate the results of lm-evaluation-harness."""
    rows = [
        [model["name"], task, metric, f"{value:.4f}"]
        for model in models
        for task, metrics in (model.get("harness") or {}).items()
        for metric, value in metrics.items()
    ]
    return Table("harness", ["model", "task", "metric", "value"], rows)


def tabulate_models(report: Report) -> Table:
    """Tabulate the recipe and the context length of each model, and how it was run."""
    rows = [
        [
            _name(model),
            model["summary"],
            model["trained_length"],
            model["context_length"],
            _format_computed(model),
            Cell(model["digest"][:12], style="code"),
        ]
        for model in report["models"]
    ]
    head = ["model", "recipe", "original context length", "context length", "dtype, attention, device", "digest"]
    return Table("Models", head, rows)


def _format_computed(model: Mapping[str, Any]) -> str:
    """Return dtype, attention and device of a model, or its server and its name there."""
    if "served_model" in model:
        return f"{model['engine']}, {model['served_model'] or 'default model'}"
    return f"{model.get('dtype')}, {model.get('attention')}, {model.get('device')}"


def tabulate_settings(report: Report) -> Table:
    """Tabulate the settings, the versions and the digests of a report."""
    rows = [[key, value] for key, value in report["settings"].items() if value is not None]
    rows += report["versions"].items()
    rows += [[f"digest of {model['name']}", Cell(model["digest"], style="code")] for model in report["models"]]
    return Table("Settings", [], rows)
