"""The commands that made a checkpoint, written so that they can be typed again."""

import dataclasses
import re
import shlex
from collections.abc import Mapping
from typing import Any

import yaml

from ctxext.recipes.base import Method
from ctxext.recipes.recipe import Recipe, multiplied

RECIPE_FILE = "recipe.yaml"
_UNSEEN = re.compile(r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def convert_command(source: str, revision: str | None, recipe: Recipe, out: str = "OUT") -> str:
    """The `ctxext convert` line of a recipe; its numbers as options, or as a file where options cannot say them.

    Args:
        source: A Hub id, or the name of a folder.
        revision: The commit on the Hub that was converted.
        recipe: What was applied, resolved.
        out: What the result is called.
    """
    words = ["ctxext", "convert", source, out]
    if needs_file(recipe):
        words += ["--recipe", RECIPE_FILE]
    else:
        words += [word for step in recipe.steps for word in ("--method", step.name)]
        options = {name: value for step in recipe.steps for name, value in _given(step).items()}
        for name, value in options.items():
            words += ["--" + name.replace("_", "-"), _plain(value)]
    if revision:
        words += ["--revision", revision]
    return shlex.join(words)


def wrapped(command: str, width: int = 88) -> str:
    """A long command on several lines, which a shell reads as one; for a page, so that no word of it begins a line."""
    lines = [""]
    for word in shlex.split(command):
        quoted = shlex.quote(_UNSEEN.sub("?", word))
        if lines[-1] and len(lines[-1]) + len(quoted) > width and word.startswith("--"):
            lines.append("   ")
        lines[-1] += f" {quoted}" if lines[-1] else quoted
    return " \\\n".join(lines)


def needs_file(recipe: Recipe) -> bool:
    """Whether a recipe holds lists, one number with two values, or two factors: options cannot say that."""
    if multiplied(recipe.steps):
        return True
    options: dict[str, Any] = {}
    for step in recipe.steps:
        for name, value in _given(step).items():
            if isinstance(value, tuple) or options.setdefault(name, value) != value:
                return True
    # An option reaches every step that takes it, so a step that kept its default must not share its name.
    numbers = [(field.name, getattr(step, field.name)) for step in recipe.steps for field in dataclasses.fields(step)]
    return any(name in options and options[name] != value for name, value in numbers)


def recipe_yaml(recipe: Recipe) -> str:
    """The recipe file."""
    return yaml.safe_dump(recipe.to_dict(), sort_keys=False, allow_unicode=True, default_flow_style=None, width=100)


def _given(step: Method) -> Mapping[str, Any]:
    """The numbers of a step that differ from their defaults."""
    numbers = {field.name: (getattr(step, field.name), field.default) for field in dataclasses.fields(step)}
    return {name: value for name, (value, default) in numbers.items() if value is not None and value != default}


def _plain(value: Any) -> str:
    """A number as people write it: 4, not 4.0; all its digits all the same."""
    return str(int(value)) if isinstance(value, float) and value == int(value) and abs(value) < 1e15 else str(value)
