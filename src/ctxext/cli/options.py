"""Options that several commands share, and those read from a dataclass."""

import dataclasses
import inspect
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Annotated, Any, TypeVar

import typer

from ctxext.cli.completion import COMPLETIONS
from ctxext.cli.help import HelpAllOption
from ctxext.files.length import parse_length
from ctxext.options import Option, options_of
from ctxext.recipes.param import value_type

_Instance = TypeVar("_Instance")

HelpFor = Callable[[Sequence[str], bool], tuple[list[tuple[str, list[tuple[str, str]]]], Collection[str]]]

_REPORTING = "Output"
_HUB = "Hub"

SourceArgument = Annotated[str, typer.Argument(metavar="SOURCE", help="A folder, a Hub id (user/name), or demo.")]
RevisionOption = Annotated[
    str | None, typer.Option("--revision", help="Branch, tag or commit on the Hub.", rich_help_panel=_HUB)
]
TokenOption = Annotated[
    str | None,
    typer.Option(
        "--token",
        help="Hub token; by default the one that hf auth login stored.",
        rich_help_panel=_HUB,
        show_default=False,
    ),
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on stdout.", rich_help_panel=_REPORTING)
]
QuietOption = Annotated[
    bool, typer.Option("-q", "--quiet", help="No progress, notes or suggestions.", rich_help_panel=_REPORTING)
]
VerboseOption = Annotated[bool, typer.Option("-v", "--verbose", help="Say more.", rich_help_panel=_REPORTING)]
OverwriteAnythingOption = Annotated[
    bool, typer.Option("--overwrite-anything", help="Replace OUT and delete whatever lies there.")
]
DeviceOption = Annotated[str, typer.Option("--device", help="auto, cpu, cuda or mps.")]
DtypeOption = Annotated[
    str, typer.Option("--dtype", help="auto (as saved; on a CPU what it is fast in), bf16, fp16 or fp32.")
]


def names_in(words: Sequence[str] | None) -> tuple[str, ...]:
    """Names from options that may be repeated and may hold several with commas, each once."""
    return tuple(dict.fromkeys(name.strip() for word in words or () for name in word.split(",") if name.strip()))


def lengths_in(word: str | None) -> tuple[int, ...]:
    """Lengths in tokens from a list with commas, each once, shortest first."""
    return tuple(sorted({parse_length(length) for length in names_in([word or ""])}))


def _depths_in(word: str) -> tuple[float, ...]:
    from ctxext.evaluate.settings import parse_depths

    return parse_depths(word)


_READERS: Mapping[str, Callable[[Any], Any]] = {
    "length": parse_length,
    "lengths": lengths_in,
    "names": lambda words: names_in([words] if isinstance(words, str) else words),
    "depths": _depths_in,
}
"""Parsers of the text of an option, by the kind of option."""


def parameters_of(owner: type) -> list[inspect.Parameter]:
    """A keyword parameter with its typer option for every option of a dataclass (`ctxext.options`)."""
    fields = {field.name: field for field in dataclasses.fields(owner)}
    return [_parameter(owner, fields[name], option) for name, option in options_of(owner).items()]


def _parameter(owner: type, field: "dataclasses.Field[Any]", option: Option) -> inspect.Parameter:
    kind: Any = value_type(owner, field.name)
    default = None if field.default is dataclasses.MISSING else field.default
    if option.kind:
        kind, default = (list[str] if option.repeats else str), option.shown
    flags = option.flags or ("--" + field.name.replace("_", "-"),)
    declared = typer.Option(
        *flags,
        autocompletion=next((COMPLETIONS[flag] for flag in flags if flag in COMPLETIONS), None),
        help=option.help,
        rich_help_panel=option.panel or None,
        show_default=default is not None,
        min=option.min,
        metavar=option.metavar,
    )
    hint: Any = kind if default is not None else kind | None
    return keyword(field.name, Annotated[hint, declared], default=default)


def keyword(name: str, annotation: Any, default: Any = None) -> inspect.Parameter:
    """A keyword parameter of a command."""
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def built(owner: Callable[..., _Instance], given: Mapping[str, Any], **others: Any) -> _Instance:
    """A dataclass from the options of a command line, passing over those of others, and from fields from elsewhere."""
    values: dict[str, Any] = {}
    for name, option in options_of(typing.cast("type", owner)).items():
        if name not in others and given.get(name) is not None:
            values[name] = _READERS[option.kind](given[name]) if option.kind else given[name]
    return owner(**values, **others)


def with_parameters(
    parameters: Sequence[inspect.Parameter], after: str, advanced: Collection[str] = (), help_for: HelpFor | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace the **options of a command with the parameters that it stands for.

    Args:
        parameters: What **options takes.
        after: The name of the command's parameter after which help shows them.
        advanced: Parameters that only `--help-all` shows.
        help_for: Says from the words of a command line what help shows beside the parameters, and which it leaves out.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(function)
        declared = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        first = 1 + next(i for i, parameter in enumerate(declared) if parameter.name == after)
        ordered = [*declared[:first], *parameters, *declared[first:]]
        if advanced or help_for:
            ordered.append(keyword("help_all", HelpAllOption, default=False))
        function.__signature__ = signature.replace(parameters=ordered)  # type: ignore[attr-defined]
        function.__annotations__ = {parameter.name: parameter.annotation for parameter in ordered}
        function.advanced = frozenset(advanced)  # type: ignore[attr-defined]
        function.help_for = help_for  # type: ignore[attr-defined]
        return function

    return decorate
