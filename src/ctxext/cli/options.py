"""Options that several commands share, and how a command takes the options of dataclasses."""

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from types import EllipsisType
from typing import Annotated, Any

import typer

from ctxext.cli.completion import COMPLETIONS
from ctxext.cli.help import HelpAllOption
from ctxext.errors import CtxextError
from ctxext.options import Option, option_name, options_of
from ctxext.recipes.param import value_type

HelpFor = Callable[[Sequence[str], bool], tuple[list[tuple[str, list[tuple[str, str]]]], Collection[str]]]

_REPORTING = "Output"
_LAST = ("Hub", _REPORTING)
"""The panels that end each help."""

SourceArgument = Annotated[str, typer.Argument(metavar="SOURCE", help="A folder, a Hub id (user/name), or demo.")]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on stdout.", rich_help_panel=_REPORTING)
]
QuietOption = Annotated[
    bool, typer.Option("-q", "--quiet", help="No progress, notes or suggestions.", rich_help_panel=_REPORTING)
]
VerboseOption = Annotated[bool, typer.Option("-v", "--verbose", help="Say more.", rich_help_panel=_REPORTING)]


def keyword(name: str, annotation: Any, default: Any = None) -> inspect.Parameter:
    """A keyword parameter of a command."""
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _parameters_of(owner: type) -> list[inspect.Parameter]:
    """A keyword parameter with its typer option for every option of a dataclass (`ctxext.options`)."""
    fields = {field.name: field for field in dataclasses.fields(owner)}
    return [_parameter(owner, fields[name], option) for name, option in options_of(owner).items()]


def _parameter(owner: type, field: "dataclasses.Field[Any]", option: Option) -> inspect.Parameter:
    kind: Any = value_type(owner, field.name)
    default = None if field.default is dataclasses.MISSING else field.default
    if option.kind or option.repeats:
        kind, default = (list[str] if option.repeats else str), option.shown
    flags = option.flags or (option_name(field.name),)
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


def built(owner: type, given: Mapping[str, Any]) -> Any:
    """Create a dataclass from command-line values; raise if a required option is missing."""
    options = options_of(owner)
    values = {name: given[name] for name in options if given.get(name) not in (None, (), [])}
    for name, option in options.items():
        if option.missing is not None and name not in values:
            raise CtxextError(option.missing[0], hint=option.missing[1])
    return owner(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


def takes_options(
    *,
    order: Sequence[str | EllipsisType] = (...,),
    without: Collection[str] = (),
    more: Sequence[inspect.Parameter] = (),
    help_for: HelpFor | None = None,
    prepare: Callable[[dict[str, Any]], dict[str, Any]] = dict,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Let a command take the options of each dataclass among its parameters one by one, and give it the objects.

    If two dataclasses have an option of the same name, the first declaration is used and both receive the value.

    Args:
        order: Names in the order of help; ... stands for those that are not named, as they are declared.
        without: Options that the command does not have.
        more: Parameters that replace the command's `**` parameter.
        help_for: Says from the words of a command line what help shows beside the parameters, and which it leaves out.
        prepare: Completes the values before the objects are created.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(function)
        declared = signature.parameters.values()
        owners: dict[str, Any] = {p.name: p.annotation for p in declared if dataclasses.is_dataclass(p.annotation)}
        options = {name: option for owner in owners.values() for name, option in options_of(owner).items()}
        taken = {*options, "help_all"}
        parameters: dict[str, inspect.Parameter] = {}
        for argument in declared:
            others = more if argument.kind is inspect.Parameter.VAR_KEYWORD else [argument]
            for parameter in _parameters_of(owners[argument.name]) if argument.name in owners else others:
                if parameter.name not in without:
                    parameters.setdefault(parameter.name, parameter)

        def place(parameter: inspect.Parameter) -> tuple[Any, ...]:
            _, *infos = typing.get_args(parameter.annotation) or (None,)
            is_last = bool(infos) and infos[0].rich_help_panel in _LAST
            return parameter.kind, is_last, order.index(parameter.name if parameter.name in order else ...)

        @functools.wraps(function)
        def command(**given: Any) -> None:
            given = prepare(given)
            objects = {name: built(owner, given) for name, owner in owners.items()}
            function(**objects, **{name: value for name, value in given.items() if name not in taken})

        ordered = sorted(parameters.values(), key=place)
        advanced = frozenset(name for name, option in options.items() if option.advanced)
        if advanced or help_for:
            ordered.append(keyword("help_all", HelpAllOption, default=False))
        command.__signature__ = signature.replace(parameters=ordered)  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in ordered}
        command.advanced, command.help_for = advanced, help_for  # type: ignore[attr-defined]
        kept = {name for name, option in options.items() if option.kept}
        command.kept = kept | {"help_all"}  # type: ignore[attr-defined]
        return command

    return decorate
