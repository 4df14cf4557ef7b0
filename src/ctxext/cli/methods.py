"""`ctxext methods`: the table of methods, generated from their classes."""

import inspect
from typing import Annotated

import typer

from ctxext.cli.help import section
from ctxext.cli.method_options import example_of, method_sections
from ctxext.cli.options import JsonOption
from ctxext.cli.output import Output
from ctxext.recipes.base import Method
from ctxext.recipes.param import limits_of, options_of
from ctxext.recipes.registry import METHODS, method_named


def methods(
    name: Annotated[str | None, typer.Argument(metavar="METHOD", help="Show this method alone, in full.")] = None,
    *,
    experimental: Annotated[
        bool, typer.Option("--experimental", help="Show also those that gained nothing where they were measured.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """List the methods, what each needs and where it comes from.

    Examples:
    ctxext methods

    ctxext methods yarn

    ctxext methods --experimental
    """
    output = Output(as_json=as_json)
    if name is not None:
        method = method_named(name)
        lines = [line for title, rows in method_sections(method) for line in section(title, rows, output.stdout)]
        output.result(method_data(method), *lines)
        return
    groups: dict[str, list[tuple[str, str]]] = {}
    for method in METHODS:
        if experimental or not method.is_experimental:
            names = ", ".join((method.name, *method.aliases))
            groups.setdefault(f"Carried by {carried_by(method)}", []).append((names, summary_of(method)))
    lines = [line for title, rows in groups.items() for line in section(title, rows, output.stdout)]
    left_out = [] if experimental else [f"\nexperimental, by name alike: {' '.join(experimental_names())}"]
    output.result({"methods": [method_data(method) for method in METHODS]}, *lines, *left_out)
    output.next_step("ctxext", "methods", "NAME", why="One of them, with its options")


def experimental_names() -> list[str]:
    """The names of experimental methods."""
    return [method.name for method in METHODS if method.is_experimental]


def summary_of(method: type[Method]) -> str:
    """The first line of a method's docstring."""
    return (inspect.getdoc(method) or "").splitlines()[0]


def carried_by(method: type[Method]) -> str:
    """What a checkpoint needs to carry the method."""
    if method.kind == "table":
        return "config.json and the table in the weights"
    return "code in the checkpoint" if method.needs_code() else "config.json"


def method_data(method: type[Method]) -> dict[str, object]:
    """A method as JSON."""
    return {
        "name": method.name,
        "aliases": list(method.aliases),
        "title": method.title,
        "summary": summary_of(method),
        "paper": method.paper,
        "carried_by": carried_by(method),
        "experimental": method.is_experimental,
        "options": {field.name: limits_of(field).describe() for field in options_of(method)},
        "caution": method.caution,
        "difference": method.difference,
        "example": example_of(method),
    }
