"""What the figures of a report say, in sentences that are computed from them."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ctxext.evaluate.report.intervals import wilson_interval
from ctxext.evaluate.report.report import Report

_UNEVEN = 0.3
_SAME_LOSS = 0.02
_MAX_TOLD = 4
"""So many models beside the best are told one by one."""


def findings(report: Report, names: Mapping[str, str] | None = None) -> list[str]:
    """One sentence for each task, and one for the cost of extending.

    Args:
        report: The content of report.json.
        names: What to call the models; by default their own names.
    """
    models = [{**model, "name": (names or {}).get(model["name"], model["name"])} for model in report["models"]]
    tasks = dict.fromkeys(cell["task"] for model in models for cell in model["cells"])
    found = [_retrieval(task, models) for task in tasks]
    found += [_long_text(models), _cost(models)]
    return [sentence for sentence in found if sentence]


def pooled(cells: Sequence[dict[str, Any]]) -> tuple[float, float, float]:
    """The share of right answers over several cells, with its interval."""
    correct, samples = sum(cell["correct"] for cell in cells), sum(cell["samples"] for cell in cells)
    return correct / max(samples, 1), *wilson_interval(correct, samples)


def percent(share: float) -> str:
    """A share as whole percent; only all and nothing are written as 100 and 0."""
    value = round(100 * share)
    return str(min(99, max(1, value)) if 0 < share < 1 else value)


def _retrieval(task: str, models: Sequence[dict[str, Any]]) -> str:
    """Who finds how much at the longest length at which anything is found, and where the best is weak."""
    asked = {model["name"]: [cell for cell in model["cells"] if cell["task"] == task] for model in models}
    cells = [cell for own in asked.values() for cell in own]
    longest = max(cell["length"] for cell in cells)
    reached = [cell["length"] for cell in cells if cell["correct"]]
    if not reached:
        return f"{task}: nothing was found at any length."
    length = max(reached)
    at_length = {name: [cell for cell in own if cell["length"] == length] for name, own in asked.items()}
    shares = {name: pooled(own) for name, own in at_length.items() if own}
    best, *others = sorted(shares, key=lambda name: shares[name][0], reverse=True)
    share, low, high = shares[best]
    sentence = f"{task} at {length} tokens: {best} finds {percent(share)} % ({percent(low)}–{percent(high)})"
    sentence += "".join(f", {name} {percent(shares[name][0])} %" for name in others[:_MAX_TOLD])
    if rest := others[_MAX_TOLD:]:
        least, most = percent(shares[rest[-1]][0]), percent(shares[rest[0]][0])
        sentence += f", {len(rest)} others {least if least == most else f'{least} to {most}'} %"
    weakest = min(at_length[best], key=lambda cell: cell["share"])
    strongest = max(at_length[best], key=lambda cell: cell["share"])
    if strongest["share"] - weakest["share"] >= _UNEVEN and weakest["depth"] is not None:
        sentence += (
            f"; {best} is uneven: {percent(weakest['share'])} % at depth {round(100 * weakest['depth'])} %,"
            f" {percent(strongest['share'])} % at depth {round(100 * strongest['depth'])} %"
        )
    return f"{sentence}; at {longest} tokens nothing was found." if longest > length else f"{sentence}."


def _long_text(models: Sequence[dict[str, Any]]) -> str:
    """Whether more context still lowers the loss beyond the original context length."""
    told = []
    for model in models:
        trained, measured = model["trained_length"], model["perplexity"]
        if not trained or not measured or measured["length"] < 2 * trained:
            continue
        inside = [point for point in measured["curve"] if trained / 2 <= point["start"] and point["end"] <= trained]
        beyond = [point for point in measured["curve"] if point["start"] >= measured["length"] / 2]
        if not inside or not beyond:  # A point of a long text's curve may be wider than a short context.
            continue
        change = _mean_loss(beyond) - _mean_loss(inside)
        how = "stays" if abs(change) < _SAME_LOSS else "falls" if change < 0 else "rises"
        told.append((change, f"{model['name']} {how} ({change:+.2f})"))
    if not told:
        return ""
    shown = [sentence for _, sentence in told]
    if len(told) > 2 * _MAX_TOLD:
        shown = [f"from {min(told)[1]} to {max(told)[1]}, {len(told)} models,"]
    return (
        "Loss on long text, from the last half of the original context length to the last half of the text: "
        f"{', '.join(shown)} nats per token."
    )


def _mean_loss(points: Sequence[dict[str, Any]]) -> float:
    weights = sum(point["count"] for point in points)
    return float(math.fsum(point["loss"] * point["count"] for point in points) / weights)


def _cost(models: Sequence[dict[str, Any]]) -> str:
    told = []
    for model in models:
        against = (model["short"] or {}).get("against")
        if against:
            sure = f", {against['low']:+.3f} to {against['high']:+.3f}" if against["low"] is not None else ""
            told.append(f"{model['name']} {against['loss']:+.3f} (perplexity × {against['ratio']:.3f}{sure})")
    if not told:
        return ""
    if len(told) > 2 * _MAX_TOLD:
        known = [model for model in models if (model["short"] or {}).get("against")]
        known.sort(key=lambda model: float(model["short"]["against"]["loss"]))
        least, most = known[0], known[-1]
        told = [f"{model['name']} {model['short']['against']['loss']:+.3f}" for model in (least, most)]
        told = [f"from {told[0]} to {told[1]}, {len(known)} models"]
    return f"Cost at the original context length, in nats per token against the source: {'; '.join(told)}."
