"""Findings of a report: sentences computed from its scores."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ctxext.report.forms import describe_counts, describe_cut, describe_thoughts
from ctxext.report.intervals import share_interval
from ctxext.report.report import Report, tasks_of, texts_of
from ctxext.tasks.registry import GROUPS, RETRIEVAL_TASKS

_SAME_LOSS = 0.02
_MAX_NAMED = 4
"""Maximum number of models besides the best to list individually."""

_POOLED = {"ruler": "RULER (13 tasks)", "ruler2": "RULER v2 (12 tasks)"}
"""Groups of tasks with one sentence for all of them."""


def findings(report: Report) -> list[str]:
    """Return the verdict of a comparison, a sentence for each task, and one for the cost of extending."""
    models = report["models"]
    tasks = tasks_of(report)
    complete = {name: GROUPS[group] for group, name in _POOLED.items() if {*tasks} >= {*GROUPS[group]}}
    pooled = {task for group in complete.values() for task in group}
    sentences = [_describe_retrieval(name, group, models) for name, group in complete.items()]
    sentences += [_describe_retrieval(task, (task,), models) for task in tasks if task not in pooled]
    verdict = report.get("comparison", {}).get("verdict", "")
    answers = [describe(model) for model in models for describe in (describe_cut, describe_thoughts, describe_counts)]
    return [
        text for text in (verdict, *sentences, *answers, _describe_long_text(models), _describe_cost(models)) if text
    ]


def pool_cells(cells: Sequence[dict[str, Any]]) -> tuple[float, float, float]:
    """Compute the share of correct answers over several cells and its 95 % interval; questions may share a text."""
    correct, samples = sum(cell["correct"] for cell in cells), sum(cell["samples"] for cell in cells)
    return correct / max(samples, 1), *share_interval(texts_of(cells))


def format_percent(share: float) -> str:
    """Format a share in whole percent, from 1 to 99 unless it is exactly 0 or 1."""
    value = round(100 * share)
    return str(min(99, max(1, value)) if 0 < share < 1 else value)


def format_count(number: int, noun: str) -> str:
    """Format a number with its noun, which gets an "s" unless the number is 1."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def describe_samples(report: Mapping[str, Any]) -> str:
    """Describe the number of samples per cell, which is a maximum if a time limit left some out."""
    most = format_count(report["settings"]["samples"], "sample")
    return f"{'up to ' if report.get('num_missed') else ''}{most} per cell"


def format_interval(low: float, high: float) -> str:
    """Format an interval of shares in whole percent."""
    return f"{format_percent(low)}–{format_percent(high)}"


def _describe_retrieval(name: str, tasks: Sequence[str], models: Sequence[dict[str, Any]]) -> str:
    """Describe the scores at the longest length with correct answers, and the best model's weakest depth."""
    by_model = {model["name"]: [cell for cell in model["cells"] if cell["task"] in tasks] for model in models}
    cells = [cell for of_model in by_model.values() for cell in of_model]
    longest = max(cell["length"] for cell in cells)
    reached = [cell["length"] for cell in cells if cell["correct"]]
    if not reached:
        sentence = f"{name}: no correct answers at any length."
        shortest = min(cell["length"] for cell in cells)
        if any(shortest <= (model["trained_length"] or 0) for model in models):
            easier = " or ".join(dict.fromkeys(option for task in tasks if (option := RETRIEVAL_TASKS[task].easier)))
            sentence += (
                f" {shortest} tokens are within the original context length, so the model probably cannot do this "
                f"task at all, and its scores do not measure the context.{f' Use {easier}.' if easier else ''}"
            )
        return sentence
    length = max(reached)
    at_length = {name: [cell for cell in cells if cell["length"] == length] for name, cells in by_model.items()}
    shares = {name: pool_cells(cells) for name, cells in at_length.items() if cells}
    best, *others = sorted(shares, key=lambda name: shares[name][0], reverse=True)
    share, low, high = shares[best]
    sentence = f"{name} at {length} tokens: {best} finds {format_percent(share)} % ({format_interval(low, high)})"
    for other in others[:_MAX_NAMED]:
        of_other, low_of_other, high_of_other = shares[other]
        sentence += f", {other} {format_percent(of_other)} % ({format_interval(low_of_other, high_of_other)})"
    if rest := others[_MAX_NAMED:]:
        least, most = format_percent(shares[rest[-1]][0]), format_percent(shares[rest[0]][0])
        others_in_words = "1 other" if len(rest) == 1 else f"{len(rest)} others"
        sentence += f", {others_in_words} {least if least == most else f'{least} to {most}'} %"
    weakest = min(at_length[best], key=lambda cell: cell["share"])
    strongest = max(at_length[best], key=lambda cell: cell["share"])
    is_uneven = share_interval(texts_of([weakest]))[1] < share_interval(texts_of([strongest]))[0]
    if is_uneven and weakest["depth"] is not None and len(tasks) == 1:
        sentence += (
            f"; {best} is uneven: {format_percent(weakest['share'])} % at depth {round(100 * weakest['depth'])} %,"
            f" {format_percent(strongest['share'])} % at depth {round(100 * strongest['depth'])} %"
        )
    return f"{sentence}; no correct answers at {longest} tokens." if longest > length else f"{sentence}."


def _describe_long_text(models: Sequence[dict[str, Any]]) -> str:
    """Describe for each model the change of the loss from the original context length to the end of a long text."""
    changes = []
    for model in models:
        trained, measured = model["trained_length"], model["perplexity"]
        if not trained or not measured or measured["length"] < 2 * trained:
            continue
        inside = [point for point in measured["curve"] if trained / 2 <= point["start"] and point["end"] <= trained]
        beyond = [point for point in measured["curve"] if point["start"] >= measured["length"] / 2]
        if not inside or not beyond:  # A point of the curve may be wider than a short context.
            continue
        change = _compute_mean_loss(beyond) - _compute_mean_loss(inside)
        note = " (unchanged)" if abs(change) < _SAME_LOSS else ""
        changes.append((change, f"{model['name']} {change:+z.2f}{note}"))
    if not changes:
        return ""
    shown = [sentence for _, sentence in changes]
    if len(changes) > 2 * _MAX_NAMED:
        shown = [f"from {min(changes)[1]} to {max(changes)[1]}, {len(changes)} models"]
    return (
        "Loss in the last half of long texts, in nats per token against the last half of the original context length: "
        f"{', '.join(shown)}."
    )


def _compute_mean_loss(points: Sequence[dict[str, Any]]) -> float:
    weights = sum(point["count"] for point in points)
    return float(math.fsum(point["loss"] * point["count"] for point in points) / weights)


def _describe_cost(models: Sequence[dict[str, Any]]) -> str:
    """Describe the loss at the original context length against the source, for each model or as a range."""
    costs = []
    for model in models:
        against = (model["short"] or {}).get("against")
        if against:
            interval = f", {against['low']:+z.3f} to {against['high']:+z.3f}" if against["low"] is not None else ""
            text = f"{model['name']} {against['loss']:+z.3f}"
            costs.append((float(against["loss"]), text, f"{text} (perplexity × {against['ratio']:.3f}{interval})"))
    if not costs:
        return ""
    sentences = [sentence for _, _, sentence in costs]
    if len(costs) > 2 * _MAX_NAMED:
        costs.sort(key=lambda cost: cost[0])
        sentences = [f"from {costs[0][1]} to {costs[-1][1]}, {len(costs)} models"]
    return f"Cost at the original context length, in nats per token against the source: {'; '.join(sentences)}."
