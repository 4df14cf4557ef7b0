"""Sentences about the form of prompts, and answers that were cut or have thoughts, for pages, cards and terminal."""

from collections.abc import Iterator, Mapping, Sequence
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
    parts = [
        f"{count} of {samples} answers to {task} ended at the limit of {model['forms'][task]['room']:,} tokens"
        for task, count, samples in _count_answers(model, "cut")
    ]
    return f"{model['name']}: {', '.join(parts)}, without the full score." if parts else ""


def describe_thoughts(model: Mapping[str, Any]) -> str:
    """Describe how many answers of a model have thoughts although they are switched off; empty if none has."""
    parts = [f"{count} of {samples} answers to {task}" for task, count, samples in _count_answers(model, "thought")]
    return f"{model['name']}: {', '.join(parts)} have thoughts, although they are switched off." if parts else ""


def _count_answers(model: Mapping[str, Any], name: str) -> Iterator[tuple[str, int, int]]:
    """Yield the name of each task with a form, the number of answers with a mark, and that of all, if any has it."""
    for task in model.get("forms") or {}:
        cells = [cell for cell in model["cells"] if cell["task"] == task]
        if count := sum(cell.get(name, 0) for cell in cells):
            yield task, count, sum(cell["samples"] for cell in cells)


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
