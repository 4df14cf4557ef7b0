"""`ctxext methods`, the options of all methods, and the recipe built from them."""

import dataclasses
import functools
import inspect
import json
import shlex
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_origin

import typer

from ctxext.cli.help import Row, section
from ctxext.cli.options import keyword, takes_options
from ctxext.cli.output import Output
from ctxext.errors import CtxextError
from ctxext.files.length import parse_length
from ctxext.files.strict import parse_yaml, read_text
from ctxext.options import option_name, value_type
from ctxext.recipes.base import Method
from ctxext.recipes.param import default_of, parameter_of, parameters_of
from ctxext.recipes.registry import METHODS, method_named

if TYPE_CHECKING:
    from ctxext.recipes.recipe import Recipe

_SHARED = ("factor", "target_length")
_OF_AUTO = ("trials", "minutes")
_OF_CALIBRATION = ("text", "device", "dtype")


@takes_options(without=("quiet", "verbose"))
def methods(
    name: Annotated[str | None, typer.Argument(metavar="METHOD", help="Show the details of this method.")] = None,
    *,
    output: Output,
    experimental: Annotated[
        bool, typer.Option("--experimental", help="Also list methods without a measured benefit over others.")
    ] = False,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON Schema of recipe files, for editors.")
    ] = False,
) -> None:
    """List the methods with their requirements and papers.

    Examples:
    ctxext methods

    ctxext methods yarn

    ctxext methods --experimental

    ctxext methods --schema
    """
    if schema:
        from ctxext.recipes.schema import recipe_schema

        output.schema(recipe_schema())
        return
    if name is not None:
        method = method_named(name)
        lines = [line for title, rows in method_sections(method) for line in section(title, rows, output.stdout)]
        output.result(method_data(method), *lines)
        return
    groups: dict[str, list[tuple[str, str]]] = {}
    for method in METHODS:
        if experimental or not method.is_experimental:
            names = ", ".join((method.name, *method.aliases))
            groups.setdefault(f"Stored in {carried_by(method)}", []).append((names, summary_of(method)))
    lines = [line for title, rows in groups.items() for line in section(title, rows, output.stdout)]
    others = [] if experimental else [f"\nExperimental methods: {', '.join(experimental_names())}"]
    output.result({"methods": [method_data(method) for method in METHODS]}, *lines, *others)
    output.next_step("ctxext", "methods", "NAME", why="Show a method and its options")


def experimental_names() -> list[str]:
    """Return the names of experimental methods."""
    return [method.name for method in METHODS if method.is_experimental]


def summary_of(method: type[Method]) -> str:
    """Return the first line of a method's docstring."""
    return (inspect.getdoc(method) or "").splitlines()[0]


def carried_by(method: type[Method]) -> str:
    """Return the parts of a checkpoint that contain the method."""
    if method.kind == "table":
        return "config.json and the table in the weights"
    return "code in the checkpoint" if method.needs_code() else "config.json"


def method_data(method: type[Method]) -> dict[str, object]:
    """Return a method as JSON."""
    return {
        "name": method.name,
        "aliases": list(method.aliases),
        "title": method.title,
        "summary": summary_of(method),
        "paper": method.paper,
        "carried_by": carried_by(method),
        "experimental": method.is_experimental,
        "options": {field.name: parameter_of(field).describe() for field in parameters_of(method)},
        "caution": method.caution,
        "difference": method.difference,
        "example": example_of(method),
    }


@functools.cache
def option_owners() -> dict[str, list[type[Method]]]:
    """Return every method option by its Python name, with the methods that take it."""
    owners: dict[str, list[type[Method]]] = {}
    for method in METHODS:
        for field in parameters_of(method):
            owners.setdefault(field.name, []).append(method)
    return owners


def method_parameters() -> list[inspect.Parameter]:
    """Return a keyword parameter with its typer option for every method option, None by default."""
    parameters = []
    for name, owners in option_owners().items():
        kind, flag = value_type(owners[0], name), option_name(name)
        usual = [method for method in owners if not method.is_experimental]
        panel = f"Options of {_names(usual)}" if usual else "Options of experimental methods"
        is_file = get_origin(kind) is tuple
        option = typer.Option(
            f"{flag}/--no-{flag[2:]}" if kind is bool else flag,
            help=_shared_help(name, usual or owners, always_named=not usual),
            rich_help_panel="Context length" if name in _SHARED else panel,
            show_default=False,
            metavar="FILE" if is_file else None,
        )
        is_length = parameter_of(owners[0].__dataclass_fields__[name]).kind == "length"
        hint: Any = str if is_file or is_length else kind
        parameters.append(keyword(name, Annotated[hint | None, option]))
    return parameters


def _names(methods: Collection[type[Method]]) -> str:
    return ", ".join(method.name for method in methods)


def help_of(field: "dataclasses.Field[Any]") -> str:
    """Return the help of a method's option, with its limits and its default."""
    default = default_of(field)
    if default is None or default is dataclasses.MISSING:
        return parameter_of(field).describe()
    shown = f"{default:g}" if isinstance(default, float) else default
    return f"{parameter_of(field).describe()} Default: {shown}."


def _shared_help(name: str, methods: Sequence[type[Method]], *, always_named: bool) -> str:
    """Return the help of an option; if methods describe it differently, once for each of them."""
    texts: dict[str, list[type[Method]]] = {}
    for method in methods:
        texts.setdefault(help_of(method.__dataclass_fields__[name]), []).append(method)
    if len(texts) == 1 and not always_named:
        return next(iter(texts))
    return " ".join(f"{_names(owners)}: {text}" for text, owners in texts.items())


def build_recipe(methods: Sequence[str], recipe: str | None, options: Mapping[str, Any]) -> "Recipe":
    """Return the recipe of methods in order, or of a file or preset; options by Python name override its parameters."""
    from ctxext.recipes.recipe import load_recipe, multiplying_steps, recipe_from_dict

    if bool(methods) == bool(recipe):
        raise CtxextError(
            "--method cannot be combined with --recipe." if methods else "Missing --method or --recipe.",
            hint="List the methods with ctxext methods.",
        )
    if recipe:
        content = load_recipe(recipe).to_dict()
    else:
        content = {"steps": [{"method": method_named(name).name} for name in methods]}
    values = {name: _parse_value(name, value) for name, value in options.items()}
    for name, value in values.items():
        owners = option_owners()[name]
        takers = [step for step in content["steps"] if method_named(step["method"]) in owners]
        if not takers:
            used = [step["method"] for step in content["steps"]]
            if name in _SHARED:
                value = f"{options[name]:g}" if isinstance(options[name], float) else options[name]
                words = ["--method yarn", option_name(name), str(value), *(f"--method {method}" for method in used)]
                raise CtxextError(
                    f"{' and '.join(used)} cannot extend the context by {option_name(name)}.",
                    hint=f"Combine: {' '.join(words)}",
                )
            raise CtxextError(f"{option_name(name)} is an option of {_names(owners)}, not of {', '.join(used)}.")
        for step in takers:
            step[name] = value
            if name in _SHARED:
                step.pop("factor" if name == "target_length" else "target_length", None)
    if values.keys() >= {*_SHARED}:
        raise CtxextError(
            "--factor cannot be combined with --target-length.",
            hint="Remove one. A recipe file may contain both if the new length is not the factor times the original.",
        )
    steps = recipe_from_dict(content, recipe or "the command line")
    shared = next((name for name in _SHARED if name in values), None)
    if shared and (names := multiplying_steps(steps.steps)):
        raise CtxextError(
            f"{option_name(shared)} applies to the whole recipe, but {' and '.join(names)} each multiply the "
            "context length.",
            hint="Use one of them, or specify a factor for each in a recipe file: --recipe FILE.",
        )
    return steps


def _parse_value(name: str, value: Any) -> Any:
    """Return an option's value as in a recipe file: lengths as numbers, files as their lists."""
    if parameter_of(option_owners()[name][0].__dataclass_fields__[name]).kind == "length":
        return parse_length(value)
    if get_origin(value_type(option_owners()[name][0], name)) is not tuple:
        return value
    try:
        content = parse_yaml(read_text(Path(value)), value)
    except CtxextError as error:
        raise CtxextError(f'{option_name(name)}: "{value}" is not a list of numbers.', hint=error.message) from error
    numbers = content.get(name) if isinstance(content, dict) else content
    if not isinstance(numbers, list):
        raise CtxextError(
            f'{option_name(name)}: "{value}" does not contain a list of numbers.',
            hint=f"Write a list, or an object with {json.dumps(name)}.",
        )
    return numbers


def method_sections(method: type[Method], *, options: bool = True) -> list[tuple[str, list[Row]]]:
    """Return the help sections of a method: differences from its paper first, its options last."""
    paragraphs = (inspect.getdoc(method) or "").split("\n\n")
    lines = {
        "unlike the paper": method.difference,
        "summary": paragraphs[0],
        "formula": " ".join(paragraphs[1:]),
        "note": method.caution,
        "paper": method.paper,
        "example": example_of(method),
    }
    sections = [(f"{method.title} ({method.name})", [(name, text) for name, text in lines.items() if text])]
    rows = [(option_name(field.name), help_of(field)) for field in parameters_of(method)]
    return [*sections, (f"Options of {method.name}", rows)] if options and rows else sections


def example_of(method: type[Method]) -> str:
    """Return an example command that converts with the method."""
    source = "demo" if method.encoding == "rotary" else "MODEL"
    shown = {"factor", *(field.name for field in parameters_of(method) if field.default is dataclasses.MISSING)}
    numbers = {name: value for name, value in method.example.items() if name in shown}
    words = [word for name, value in numbers.items() for word in (option_name(name), f"{value:g}")]
    return shlex.join(["ctxext", "convert", source, "--method", method.name, *words])


def methods_in(words: Sequence[str]) -> list[str]:
    """Return the methods that a command line names, before it is parsed."""
    names: list[str] = []
    for position, word in enumerate(words):
        if word in ("--method", "-m"):
            names += words[position + 1 : position + 2]
        elif word.startswith("--method="):
            names.append(word.removeprefix("--method="))
        elif word.startswith("-m") and not word.startswith("--"):
            names.append(word.removeprefix("-m"))
    return names


def help_of_convert(words: Sequence[str], everything: bool) -> tuple[list[tuple[str, list[Row]]], Collection[str]]:
    """Return the additional help sections of `convert`, and the parameters that its help omits.

    Without a method on the command line, the help lists the methods. With one, it shows that method and its options.
    """
    if everything:
        return [], ()
    names = methods_in(words)
    methods = [method_named(name) for name in names if name != "auto"]
    taken = {name for name, owners in option_owners().items() if name in _SHARED or {*owners} & {*methods}}
    hidden = {*option_owners()} - taken
    if "auto" not in names:
        hidden |= {*_OF_AUTO, *(() if "head_order" in taken else _OF_CALIBRATION)}
    if names:
        return [part for method in methods for part in method_sections(method, options=False)], hidden
    rows = [(m.name, summary_of(m).split(". ")[0].rstrip(".") + ".") for m in METHODS if not m.is_experimental]
    more = (
        "NAME",
        "Show a method's options with ctxext convert --method NAME --help, all options with --help-all.",
    )
    return [("Methods", [*rows, more])], hidden
