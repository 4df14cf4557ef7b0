"""The options of the methods, derived from their classes, and the recipe that a command line describes."""

import dataclasses
import inspect
import json
import shlex
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_origin

import typer

from ctxext.cli.help import Row
from ctxext.cli.options import keyword
from ctxext.errors import CtxextError
from ctxext.files.length import parse_length
from ctxext.files.strict import parse_yaml, read_text
from ctxext.options import option_name
from ctxext.recipes.base import Method
from ctxext.recipes.param import default_of, limits_of, options_of, value_type
from ctxext.recipes.registry import METHODS, method_named

if TYPE_CHECKING:
    from ctxext.recipes.recipe import Recipe


_SHARED = ("factor", "target_length")
_OF_AUTO = ("trials", "minutes")
_OF_CALIBRATION = ("text", "device", "dtype")


def option_owners() -> dict[str, list[str]]:
    """Every method option by its Python name, with the names of the methods that take it."""
    owners: dict[str, list[str]] = {}
    for method in METHODS:
        for field in options_of(method):
            owners.setdefault(field.name, []).append(method.name)
    return owners


def method_parameters() -> list[inspect.Parameter]:
    """A keyword parameter with its typer option for every method option, None where not given."""
    parameters = []
    first_owner = {field.name: method for method in reversed(METHODS) for field in options_of(method)}
    for name, owners in option_owners().items():
        kind, flag = value_type(first_owner[name], name), option_name(name)
        usual = [owner for owner in owners if not method_named(owner).is_experimental]
        panel = f"Options of {', '.join(usual)}" if usual else "Options of experimental methods"
        is_file = get_origin(kind) is tuple
        option = typer.Option(
            f"{flag}/--no-{flag[2:]}" if kind is bool else flag,
            help=_shared_help(name, usual or owners, always_named=not usual),
            rich_help_panel="How far to reach" if name in _SHARED else panel,
            show_default=False,
            metavar="FILE" if is_file else None,
        )
        hint: Any = str if is_file or name.endswith("_length") else kind
        parameters.append(keyword(name, Annotated[hint | None, option]))
    return parameters


def help_of(field: "dataclasses.Field[Any]") -> str:
    """What help says of a method's option, with its limits and its default."""
    default = default_of(field)
    if default is None or default is dataclasses.MISSING:
        return limits_of(field).describe()
    shown = f"{default:g}" if isinstance(default, float) else default
    return f"{limits_of(field).describe()} Default: {shown}."


def _shared_help(name: str, methods: Sequence[str], *, always_named: bool) -> str:
    """The help of an option; if methods describe it differently, once for each of them."""
    texts: dict[str, list[str]] = {}
    for method in methods:
        field = next(field for field in options_of(method_named(method)) if field.name == name)
        texts.setdefault(help_of(field), []).append(method)
    if len(texts) == 1 and not always_named:
        return next(iter(texts))
    return " ".join(f"{', '.join(names)}: {text}" for text, names in texts.items())


def build_recipe(methods: Sequence[str], recipe: str | None, options: Mapping[str, Any]) -> "Recipe":
    """The recipe of methods in order, or of a recipe file or preset, with options by Python name above its numbers."""
    from ctxext.recipes.recipe import load_recipe, multiplied, recipe_from_dict

    if bool(methods) == bool(recipe):
        raise CtxextError(
            "Say what to apply: --method NAME, or --recipe FILE."
            if not methods
            else "Give --method or --recipe, not both.",
            hint="ctxext methods lists the methods.",
        )
    if recipe:
        content = load_recipe(recipe).to_dict()
    else:
        content = {"steps": [{"method": method_named(name).name} for name in methods]}
    values = {name: _parsed(name, value) for name, value in options.items()}
    for name, value in values.items():
        takers = [step for step in content["steps"] if name in _fields_of(step["method"])]
        if not takers:
            raise CtxextError(
                f"{option_name(name)} is an option of {', '.join(option_owners()[name])}, "
                f"not of {', '.join(step['method'] for step in content['steps'])}."
            )
        for step in takers:
            step[name] = value
            if name in _SHARED:
                step.pop("factor" if name == "target_length" else "target_length", None)
    if values.keys() >= {*_SHARED}:
        raise CtxextError(
            "Give --factor or --target-length, not both.",
            hint="A recipe file may say both, where the context length is not the factor times the original one.",
        )
    steps = recipe_from_dict(content, recipe or "the command line")
    reach = next((name for name in _SHARED if name in values), None)
    if reach and (names := multiplied(steps.steps)):
        raise CtxextError(
            f"{option_name(reach)} says how far the whole recipe reaches, but {' and '.join(names)} each multiply the "
            "context length.",
            hint="Keep one of them, or give each a factor of its own in a recipe file: --recipe FILE.",
        )
    return steps


def _fields_of(method: str) -> set[str]:
    return {field.name for field in options_of(method_named(method))}


def _parsed(name: str, value: Any) -> Any:
    """An option's value as a recipe file would hold it: lengths as numbers, files as their lists."""
    if name.endswith("_length"):
        return parse_length(value)
    owner = next(method for method in METHODS if name in _fields_of(method.name))
    if get_origin(value_type(owner, name)) is not tuple:
        return value
    try:
        content = parse_yaml(read_text(Path(value)), value)
    except CtxextError as error:
        raise CtxextError(
            f'{option_name(name)}: "{value}" cannot be read as a list of numbers.', hint=error.message
        ) from error
    numbers = content.get(name) if isinstance(content, dict) else content
    if not isinstance(numbers, list):
        raise CtxextError(
            f'{option_name(name)}: "{value}" holds no list of numbers.',
            hint=f"Write a list, or an object with {json.dumps(name)}.",
        )
    return numbers


def method_sections(method: type[Method], *, options: bool = True) -> list[tuple[str, list[Row]]]:
    """A method under headings: what differs from its paper first, its options last."""
    paragraphs = (inspect.getdoc(method) or "").split("\n\n")
    lines = {
        "not the paper's": method.difference,
        "does": paragraphs[0],
        "formula": " ".join(paragraphs[1:]),
        "mind": method.caution,
        "paper": method.paper,
        "example": example_of(method),
    }
    sections = [(f"{method.title} ({method.name})", [(name, text) for name, text in lines.items() if text])]
    rows = [(option_name(field.name), help_of(field)) for field in options_of(method)]
    return [*sections, (f"Options of {method.name}", rows)] if options and rows else sections


def example_of(method: type[Method]) -> str:
    """A command that converts by the method."""
    source = "demo" if method.encoding == "rotary" else "MODEL"
    required = {field.name for field in options_of(method) if field.default is dataclasses.MISSING}
    shown = {*required, "factor"}
    numbers = {name: value for name, value in method.example.items() if name in shown}
    words = [word for name, value in numbers.items() for word in (option_name(name), f"{value:g}")]
    return shlex.join(["ctxext", "convert", source, "--method", method.name, *words])


def methods_in(words: Sequence[str]) -> list[str]:
    """The methods that a command line names, before it is parsed."""
    named: list[str] = []
    for position, word in enumerate(words):
        if word in ("--method", "-m"):
            named += words[position + 1 : position + 2]
        elif word.startswith("--method="):
            named.append(word.removeprefix("--method="))
        elif word.startswith("-m") and not word.startswith("--"):
            named.append(word.removeprefix("-m"))
    return named


def help_of_convert(words: Sequence[str], everything: bool) -> tuple[list[tuple[str, list[Row]]], Collection[str]]:
    """What the help of `convert` says beside its parameters, and which parameters it leaves out.

    Without a method on the command line it lists them; with one it shows that method and its options.
    """
    if everything:
        return [], ()
    named = methods_in(words)
    methods = [method_named(name) for name in named if name != "auto"]
    wanted = {*_SHARED, *(field.name for method in methods for field in options_of(method))}
    hidden: set[str] = {name for name in option_owners() if name not in wanted}
    if "auto" not in named:
        hidden |= {*_OF_AUTO}
        if not any(field.name == "head_order" for method in methods for field in options_of(method)):
            hidden |= {*_OF_CALIBRATION}
    if named:
        return [part for method in methods for part in method_sections(method, options=False)], hidden
    usual = [method for method in METHODS if not method.is_experimental]
    summaries = {method.name: (inspect.getdoc(method) or "").splitlines()[0] for method in usual}
    rows = [(name, text.split(". ")[0].rstrip(".") + ".") for name, text in summaries.items()]
    more = ("NAME", "ctxext convert --method NAME --help shows a method's options, --help-all those of all methods.")
    return [("Methods", [*rows, more])], hidden
