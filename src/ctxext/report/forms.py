"""Sentences about the form of prompts and about answers that were cut, for pages, cards and the terminal."""

from collections.abc import Mapping, Sequence
from typing import Any

from ctxext.tasks.forms import REASONING


def describe_form(models: Sequence[Mapping[str, Any]], task: str) -> str:
    """Describe the prompts of a task for each group of models with the same form; empty if all have the base form."""
    groups: dict[str, list[str]] = {}
    for model in models:
        if any(cell["task"] == task for cell in model["cells"]):
            groups.setdefault(_describe((model.get("forms") or {}).get(task)), []).append(model["name"])
    if len(groups) < 2:
        return next(iter(groups), "") if _BASE not in groups else ""
    return " ".join(f"{', '.join(names)}: {sentence}" for sentence, names in groups.items())


_BASE = "The prompt begins the answer."


def _describe(form: Mapping[str, Any] | None) -> str:
    if form is None:
        return _BASE
    thoughts = {True: ", after thoughts", False: ", with thoughts switched off"}.get(form["thinks"], "")
    return f"Each prompt is a chat message; the model answers freely{thoughts}, in up to {form['room']:,} tokens."


def describe_cut(model: Mapping[str, Any]) -> str:
    """Describe how many answers of a model ended at their limit without the full score; empty if none did."""
    counts = {}
    for task, form in (model.get("forms") or {}).items():
        cells = [cell for cell in model["cells"] if cell["task"] == task]
        if cut := sum(cell.get("cut", 0) for cell in cells):
            counts[task] = (cut, sum(cell["samples"] for cell in cells), form["room"])
    parts = [
        f"{cut} of {samples} answers to {task} ended at the limit of {room:,} tokens"
        for task, (cut, samples, room) in counts.items()
    ]
    return f"{model['name']}: {', '.join(parts)}, without the full score." if parts else ""


def describe_counts(model: Mapping[str, Any]) -> str:
    """Describe how many tokens prompts had by the counts of a server with an unknown tokenizer; empty without them."""
    lengths: dict[int, list[int]] = {}
    for cell in model["cells"]:
        if "read" in cell:
            room = model["forms"][cell["task"]]["room"]
            lengths.setdefault(cell["length"], []).extend(count + room for count in cell["read"])
    parts = [f"{length:,}: {min(counts):,} to {max(counts):,}" for length, counts in sorted(lengths.items())]
    reason = "The tokenizer is unknown, so lengths follow the counts of the server"
    return f"{reason}. Tokens of prompts with the room for answers: {', '.join(parts)}." if parts else ""


def suggest_room(model: Mapping[str, Any]) -> str:
    """Return an option with more room for answers that were cut."""
    room = max((form["room"] for form in (model.get("forms") or {}).values()), default=0)
    return f"--reason {max(REASONING, 2 * room)}"
