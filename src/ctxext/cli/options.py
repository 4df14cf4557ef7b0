"""Options shared by several commands, their shell completions, and commands with the options of dataclasses.

typer builds a command from the signature of a function. Commands here take whole dataclasses, as in
`def finetune(model, out, *, training: TrainingOptions, run: RunOptions)`, and `takes_options` wraps them in a function
with another signature: each dataclass is replaced by one keyword parameter per option (`_parameter` makes its
`typer.Option`), and `**` by the parameters in `more`. typer reads that signature from `__signature__` and
`__annotations__`, parses the command line, and calls the wrapper with plain values. The wrapper builds the
dataclasses (`build_options`) and passes them to the command; their constructors check the values.
"""

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import EllipsisType
from typing import Annotated, Any

import typer

from ctxext.cli.help import HelpAllOption
from ctxext.cli.output import REPORTING
from ctxext.errors import CtxextError
from ctxext.options import Option, option_name, options_of, value_type

HelpFor = Callable[[Sequence[str], bool], tuple[list[tuple[str, list[tuple[str, str]]]], Collection[str]]]

_LAST = ("Hub", REPORTING)
"""The last panels of each help."""

SourceArgument = Annotated[str, typer.Argument(metavar="SOURCE", help="A folder, a Hub id (user/name) or demo.")]


def complete_method(incomplete: str) -> list[str]:
    """Complete the name of a method, or auto."""
    from ctxext.recipes.registry import METHODS

    return _beginning(incomplete, [*(method.name for method in METHODS), "auto"])


def complete_recipe(incomplete: str) -> list[str]:
    """Complete the name of a preset, or the path of a recipe file in the typed folder."""
    from ctxext.recipes.recipe import presets

    folder = Path(incomplete).parent if incomplete else Path()
    try:
        files = [str(path) for path in sorted(folder.iterdir()) if path.suffix in (".yaml", ".yml")]
    except OSError:
        files = []
    return _beginning(incomplete, [*sorted(presets()), *files])


def complete_methods(incomplete: str) -> list[str]:
    """Complete the last method in a list with commas."""
    from ctxext.recipes.registry import METHODS

    return _in_list(incomplete, [method.name for method in METHODS])


def complete_trainer(incomplete: str) -> list[str]:
    """Complete the name of another trainer."""
    from ctxext.finetune.trainers.export import TRAINERS

    return _beginning(incomplete, TRAINERS)


def complete_tasks(incomplete: str) -> list[str]:
    """Complete the last task in a list with commas."""
    from ctxext.tasks.registry import TASKS

    return _in_list(incomplete, TASKS)


_COMPLETIONS = {"--task": complete_tasks, "--eval": complete_tasks, "--methods": complete_methods}
"""Completion functions of options that are declared on a dataclass."""


def _beginning(incomplete: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]


def _in_list(incomplete: str, names: Iterable[str]) -> list[str]:
    """Complete the last entry of a list with the names that are not in it yet."""
    before, comma, last = incomplete.rpartition(",")
    taken = before.split(",")
    return [f"{before}{comma}{name}" for name in names if name.startswith(last) and name not in taken]


def keyword(name: str, annotation: Any, default: Any = None) -> inspect.Parameter:
    """Create a keyword parameter of a command."""
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _parameters_of(owner: type) -> list[inspect.Parameter]:
    """Return a keyword parameter with its typer option for every option of a dataclass (`ctxext.options`)."""
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
        autocompletion=next((_COMPLETIONS[flag] for flag in flags if flag in _COMPLETIONS), None),
        help=option.help,
        rich_help_panel=option.panel or None,
        show_default=default is not None,
        min=option.min if option.parser_checks else None,
        metavar=option.metavar,
    )
    hint: Any = kind if default is not None else kind | None
    return keyword(field.name, Annotated[hint, declared], default=default)


def build_options(owner: type, arguments: Mapping[str, Any]) -> Any:
    """Create a dataclass from command-line values; raise if a required option is missing."""
    options = options_of(owner)
    values = {name: arguments[name] for name in options if arguments.get(name) not in (None, (), [])}
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
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add the options of each dataclass among a command's parameters, and pass the command the objects.

    If two dataclasses have an option of the same name, the first declaration is used and both receive the value.

    Args:
        order: Names in the order of help; ... means all others, in the order of declaration.
        without: Options to omit.
        more: Parameters that replace the command's `**` parameter.
        help_for: Returns the additional help sections and the hidden parameters for the words of a command line.
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
        def command(**arguments: Any) -> None:
            objects = {name: build_options(owner, arguments) for name, owner in owners.items()}
            function(**objects, **{name: value for name, value in arguments.items() if name not in taken})

        ordered = sorted(parameters.values(), key=place)
        advanced = frozenset(name for name, option in options.items() if option.advanced)
        if advanced or help_for:
            ordered.append(keyword("help_all", HelpAllOption, default=False))
        command.__signature__ = signature.replace(parameters=ordered)  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in ordered}
        command.advanced_options, command.help_for = advanced, help_for  # type: ignore[attr-defined]
        command.implied_values = {  # type: ignore[attr-defined]
            flag: option.implied
            for name, option in options.items()
            for flag in option.flags or (option_name(name),)
            if option.implied
        }
        command.file_options = {  # type: ignore[attr-defined]
            name: owner for owner in owners.values() for name, option in options_of(owner).items() if option.kept
        }
        return command

    return decorate
