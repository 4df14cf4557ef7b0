"""The tables of a report as text, for the page, the model card and the terminal."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ctxext.evaluate.report.findings import format_percent, pool_cells
from ctxext.evaluate.report.report import Report
from ctxext.evaluate.tasks.longppl import WINDOW
from ctxext.files.length import format_length
from ctxext.files.strict import in_markdown


@dataclass(frozen=True)
class Table:
    """A table, to be rendered as HTML, as Markdown or in a terminal.

    Attributes:
        title: The title; in a terminal the heading of the first column.
        head: The headings of the columns; in a terminal without the first.
        rows: The cells.
        note: A paragraph above the table.
    """

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[Any]]
    note: str = ""

    def as_markdown(self, rule: str) -> str:
        """Format the head and the rows as Markdown, with a rule between them that aligns the columns."""
        head, *rows = (f"| {' | '.join(map(in_markdown, line))} |" for line in (self.head, *self.rows))
        return "\n".join([head, rule, *rows])


def in_percent(cells: Sequence[dict[str, Any]]) -> tuple[str, str]:
    """Format the share of correct answers over several cells, and its 95 % interval."""
    share, low, high = pool_cells(cells)
    return format_percent(share), f"{format_percent(low)}–{format_percent(high)}"


def effective_text(effective: Mapping[str, Any] | None, longest: int) -> str:
    """Format an effective length, with its interval if there is more than one length in it.

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
    counts = {model["ruler"]["tasks"] for model in models if model.get("ruler")}
    return f"RULER ≥ 85.6 % ({max(counts)} of 13 tasks)" if counts else ""


def perplexities(report: Report) -> tuple[str, list[int], list[tuple[dict[str, Any], str, dict[str, Any]]]]:
    """Return the task that measured long texts, its context lengths, and the curves of each model.

    Each model has a curve for all texts (""), and one for each kind of text by name.
    """
    models = [model for model in report["models"] if model["perplexity"]]
    task = next((str(model["perplexity"].get("task", "perplexity")) for model in models), "")
    lengths = sorted({int(length) for model in models for length in model["perplexity"]["lengths"]})
    each = [(model, {"": model["perplexity"], **model["perplexity"].get("texts", {})}) for model in models]
    return task, lengths, [(model, text, curve) for model, curves in each for text, curve in curves.items()]


def figures(by_length: Mapping[str, Any], lengths: Sequence[int]) -> list[str]:
    """Format the perplexity at each length."""
    measured = (by_length.get(str(length)) for length in lengths)
    return ["–" if figure is None else f"{figure['perplexity']:.2f}" for figure in measured]


def change_in_loss(measured: Mapping[str, Any]) -> tuple[str, str]:
    """Format the loss at the original context length against the source, and its interval; empty if unknown."""
    against = measured.get("against")
    if not against:
        return "", ""
    interval = f"{against['low']:+z.4f} to {against['high']:+z.4f}" if against["low"] is not None else ""
    return f"{against['loss']:+z.4f}", interval


def key_token_rows(report: Report) -> list[list[str]]:
    """Return rows of model, length, loss on key tokens, and numbers of key tokens, of all tokens and of documents."""
    return [
        [model["name"], length, f"{losses['loss']:.3f}" if losses["count"] else "–"]
        + [str(losses[key]) for key in ("count", "of", "documents")]
        for model in report["models"]
        for length, losses in (model.get("longppl") or {}).items()
    ]


def describe_evaluator(report: Report) -> str:
    """Return a sentence about the evaluator of key tokens and its short context; empty for reports without it."""
    by_length = [losses for model in report["models"] for losses in (model.get("longppl") or {}).values()]
    finders = dict.fromkeys((losses["evaluator"], *losses["window"]) for losses in by_length if losses.get("window"))
    return "".join(
        f"Evaluator: {name}, with short contexts of {window} to {window + step - 1} tokens"
        f"{'' if window == WINDOW else f', as the texts are too short for {WINDOW}'}. "
        for name, window, step in finders
    )


def harness_rows(models: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return rows of model, task, metric and value of lm-evaluation-harness."""
    return [
        [model["name"], task, metric, f"{value:.4f}"]
        for model in models
        for task, metrics in (model.get("harness") or {}).items()
        for metric, value in metrics.items()
    ]
