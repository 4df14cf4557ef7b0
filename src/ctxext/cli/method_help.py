"""What help says of a method: what it does, by what formula, from which paper, and with which options."""

import dataclasses
import inspect
import shlex
from collections.abc import Collection, Sequence

from ctxext.cli.help import Row
from ctxext.cli.method_options import help_of, option_name, option_owners
from ctxext.recipes.base import Method
from ctxext.recipes.param import options_of
from ctxext.recipes.registry import METHODS, method_named

_SHARED = ("factor", "target_length")
_OF_AUTO = ("trials", "minutes")
_OF_CALIBRATION = ("text", "device", "dtype")


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

    Without a method it lists them; with one it shows that method and its options.

    Args:
        words: What stands on the command line.
        everything: Whether every option is shown.
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
    rows = [(method.name, first_sentence(method)) for method in METHODS if not method.is_experimental]
    more = ("NAME", "ctxext convert --method NAME --help shows a method's options, --help-all those of all methods.")
    return [("Methods", [*rows, more])], hidden


def first_sentence(method: type[Method]) -> str:
    """The first sentence of what a method does."""
    return (inspect.getdoc(method) or "").splitlines()[0].split(". ")[0].rstrip(".") + "."
