"""A recipe: methods in the order in which they apply, with their numbers, as Python objects or as a YAML file."""

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from ctxext.errors import CtxextError
from ctxext.families import Family
from ctxext.reading.strict import parse_yaml, read_text
from ctxext.recipes.base import Method
from ctxext.recipes.length import parse_length
from ctxext.recipes.methods import method_named
from ctxext.recipes.mspoe import without_code
from ctxext.recipes.param import value_type
from ctxext.recipes.rotary import Config, provenance, read_rotary, write_rotary

_FILE_KEYS = ("description", "source", "steps")


@dataclass(frozen=True)
class Recipe:
    """Steps to apply in order.

    Attributes:
        steps: The methods with their numbers.
        description: What the recipe is for, where a file says so.
        source: Where its numbers come from, where a file says so.
    """

    steps: tuple[Method, ...]
    description: str = ""
    source: str = ""

    def __init__(self, steps: Iterable[Method], description: str = "", source: str = "") -> None:
        object.__setattr__(self, "steps", tuple(steps))
        object.__setattr__(self, "description", description)
        object.__setattr__(self, "source", source)
        if not self.steps:
            raise CtxextError("The recipe has no steps.", hint="Name a method, for example --method yarn.")
        scaling = [step.name for step in self.steps if step.scales]
        if len(scaling) > 1:
            raise CtxextError(
                f"{' and '.join(scaling)} would scale the same frequencies twice.",
                hint="Keep one of them; mspoe and abf may stand beside it.",
            )
        with_code = [number for number, step in enumerate(self.steps) if step.needs_code]
        if with_code and with_code != [len(self.steps) - 1]:
            raise CtxextError(f"{self.steps[with_code[0]].name} must be the last step, and the only one of its kind.")

    @property
    def needs_code(self) -> bool:
        """Whether the result must carry modeling code."""
        return any(step.needs_code for step in self.steps)

    def resolved(self, config: Config, family: Family) -> "Recipe":
        """The same recipe with every number that depends on the model filled in.

        Raises:
            CtxextError: a step does not fit the model.
        """
        rotary = read_rotary(config, family)
        steps = tuple(step.resolved(rotary) for step in self.steps)
        return Recipe(steps, self.description, self.source)

    def edit_config(self, config: Config, family: Family, *, with_code: bool = True) -> Config:
        """The configuration after all steps; the source's schedule must be plain.

        Args:
            config: The source's configuration; not changed.
            family: Its family.
            with_code: Without, only the steps that stock transformers carries are applied.

        Raises:
            CtxextError: a step does not apply.
        """
        # A step may raise the window; those after it must still know what the model was trained on.
        noted = {**config, "ctxext": {"trained_length": read_rotary(config, family).trained_length}}
        for step in self.steps:
            if with_code or not step.needs_code:
                noted = step.edit_config(noted, family)
        return {key: value for key, value in noted.items() if key != "ctxext"}

    def to_dict(self) -> dict[str, Any]:
        """The content of the recipe file."""
        notes = {"description": self.description, "source": self.source}
        return {**{key: note for key, note in notes.items() if note}, "steps": [step.to_dict() for step in self.steps]}

    def summary(self) -> str:
        """The recipe in a few words, for one line of output: "yarn ×4, mspoe 1.2-1.8"."""
        return ", ".join(describe_step(step.to_dict()) for step in self.steps)


def describe_step(step: Mapping[str, Any]) -> str:
    """A step, as a recipe file writes it, in a few words."""
    words = [str(step["method"])]
    if step.get("factor"):
        words.append(f"×{step['factor']:g}")
    elif step.get("target_length"):
        words.append(f"to {step['target_length']}")
    if "ratio_min" in step:
        words.append(f"{step['ratio_min']:g}–{step['ratio_max']:g} {step['schedule']} ({step['head_order']} order)")
    if step.get("method") == "abf":
        words.append(f"theta {step['theta']:g}")
    return " ".join(words)


def plain_config(config: Config, family: Family) -> Config:
    """A copy of an extended model's configuration with its schedule taken back to the trained window."""
    rotary = read_rotary(config, family)
    config = without_code(config)
    theta = provenance(config).get("source_theta") or rotary.theta
    plain = dataclasses.replace(
        rotary, theta=theta, context_length=rotary.trained_length, parameters={"rope_type": "default"}
    )
    return {key: value for key, value in write_rotary(config, family, plain).items() if key != "ctxext"}


def step_from_dict(entry: Any, place: str) -> Method:
    """One step of a recipe file.

    Args:
        entry: The mapping with `method` and its numbers.
        place: Where it stands, for errors.

    Raises:
        CtxextError: it is not a mapping, or names an unknown method or number.
    """
    if not isinstance(entry, Mapping) or "method" not in entry:
        raise CtxextError(f'{place}: each step needs a "method".')
    method = method_named(str(entry["method"]))
    names = {field.name for field in dataclasses.fields(method)}
    numbers = {key: value for key, value in entry.items() if key != "method"}
    for key in numbers:
        if key not in names:
            near = difflib.get_close_matches(str(key), names, n=1)
            raise CtxextError(
                f'{place}: {method.name} has no number "{key}".',
                hint=f'Did you mean "{near[0]}"?' if near else f"It takes: {', '.join(sorted(names))}.",
            )
        if key.endswith("_length") and isinstance(numbers[key], str):
            numbers[key] = parse_length(numbers[key])
        elif value_type(method, key) is float and isinstance(numbers[key], str):
            numbers[key] = _number(numbers[key])
    required = [
        field.name
        for field in dataclasses.fields(method)
        if field.default is dataclasses.MISSING and numbers.get(field.name) is None
    ]
    if required:
        raise CtxextError(f"{method.name} needs {', '.join(required)}.", hint=option_hint(required))
    return method(**numbers)


def option_hint(names: Iterable[str]) -> str:
    """How the missing numbers are given on the command line."""
    return "Add " + " ".join(f"--{name.replace('_', '-')} …" for name in names) + "."


def _number(text: str) -> Any:
    """YAML 1.1 reads "1e6" as a word; read it as the number it is, and leave other words to the checks."""
    try:
        return float(text)
    except ValueError:
        return text


def load_recipe(name: str) -> Recipe:
    """Read a recipe file, or one of the presets that ship with the package.

    Args:
        name: A path, or a preset's name.

    Raises:
        CtxextError: there is no such file, or it is not a recipe.
    """
    path = Path(name)
    shipped = presets()
    if path.exists() and not path.is_dir():
        text = read_text(path)
    elif name in shipped:
        text = shipped[name]
    else:
        raise CtxextError(f'There is no recipe file "{name}".', hint=f"Presets: {', '.join(sorted(shipped))}.")
    return recipe_from_dict(parse_yaml(text, name), name)


def recipe_from_dict(content: Any, place: str) -> Recipe:
    """Build a recipe from a file's content.

    Raises:
        CtxextError: the content is not a recipe.
    """
    if not isinstance(content, Mapping) or not isinstance(content.get("steps"), list):
        raise CtxextError(f'"{place}" is not a recipe: it needs a list of "steps".')
    unknown = [str(key) for key in content if key not in _FILE_KEYS]
    if unknown:
        raise CtxextError(f'"{place}": unknown key "{unknown[0]}".', hint=f"It takes: {', '.join(_FILE_KEYS)}.")
    steps = [step_from_dict(entry, f"{place}, step {number}") for number, entry in enumerate(content["steps"], 1)]
    return Recipe(steps, str(content.get("description", "")), str(content.get("source", "")))


def presets() -> dict[str, str]:
    """The recipes that ship with the package: name and file content."""
    folder = resources.files("ctxext.recipes") / "presets"
    files = [entry for entry in folder.iterdir() if entry.name.endswith(".yaml")]
    return {file.name.removesuffix(".yaml"): file.read_text(encoding="utf-8") for file in files}
