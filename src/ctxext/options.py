"""The options of a command, declared once: on the fields of their dataclass.

The command line, the documentation of the class and the checks of numbers are read from these declarations.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ctxext.errors import CtxextError

_MOST: Mapping[str, int] = {
    "seed": 2**32 - 1,  # The widest that numpy takes.
    "steps": 10_000_000,  # All of them are checked before the first.
    **dict.fromkeys(("samples", "checked", "num_needles", "batch_size", "rank"), 1_000_000),
}
_OTHERS = 10**10
"""Default maximum, equal to the longest context; results computed from it stay finite."""

_KEY = "option"
_Class = TypeVar("_Class", bound=type)
_Result = TypeVar("_Result")


def option_name(name: str) -> str:
    """Return the command-line option of a field."""
    return "--" + name.replace("_", "-")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Option:
    """The command-line form of a field.

    Attributes:
        help: One or two sentences for the user.
        panel: The group of options under which help shows it; the first one if empty.
        flags: Its names, if they are not the field's own.
        kind: The meaning of its text if typer does not read the field's type: "length" (tokens, as 32k), "lengths" or
            "names" (several, with commas), "depths", or "json"; the class parses the last two itself.
        shown: The text for the field's default in help, if it has a kind.
        min: The smallest number.
        repeats: Whether it may be given several times.
        metavar: The placeholder of the value in help.
        advanced: Whether only `--help-all` shows it.
        kept: Whether it belongs to a run that is repeated, and so to a file of options; not to a single call.
        missing: Message and hint of the error if it has no default and is not given.
    """

    help: str
    panel: str = ""
    flags: tuple[str, ...] = ()
    kind: str = ""
    shown: str | None = None
    min: float | None = None
    repeats: bool = False
    metavar: str | None = None
    advanced: bool = False
    kept: bool = True
    missing: tuple[str, str] | None = None


def option(default: Any = dataclasses.MISSING, *, help: str, repr: bool = True, **others: Any) -> Any:
    """Declare a dataclass field that is an option of a command; `Option` describes the other arguments."""
    return dataclasses.field(default=default, repr=repr, metadata={_KEY: Option(help=help, **others)})


def original_length_option(**others: Any) -> Any:
    """Declare the field of a model's original context length, which several commands have."""
    text = "Tokens that the model was trained on, as 32k, where its files do not say it or you know better."
    return option(None, help=text, kind="length", **others)


def target_length_option() -> Any:
    """Declare the field of the target context length."""
    missing = "How far should the model reach?", "Say it with --target-length, for example 32k."
    return option(help="The wanted context, for example 32k.", kind="length", missing=missing)


def options_of(owner: type) -> dict[str, Option]:
    """Return the options of a dataclass by the names of their fields, in order."""
    return {field.name: field.metadata[_KEY] for field in dataclasses.fields(owner) if _KEY in field.metadata}


def with_documented_options(owner: _Class) -> _Class:
    """Add the help texts of a dataclass's options to its docstring."""
    lines = [f"    {name}: {option.help}" for name, option in options_of(owner).items()]
    owner.__doc__ = "\n".join([(owner.__doc__ or "").rstrip(), "", "Attributes:", *lines, ""])
    return owner


@with_documented_options
@dataclasses.dataclass(frozen=True, kw_only=True)
class HubOptions:
    """Revision and token for the Hub."""

    revision: str | None = option(None, help="Branch, tag or commit on the Hub.", panel="Hub")
    token: str | None = option(
        None, help="Hub token; by default the one that hf auth login stored.", panel="Hub", kept=False, repr=False
    )


def accepts_options(owner: type, name: str = "options") -> Callable[[Callable[..., _Result]], Callable[..., _Result]]:
    """Let callers pass a function's options as an object, as keywords, or both; a keyword then replaces the field.

    `f(x, overwrite=True)` calls `f(x, options=Options(overwrite=True))`. The signature lists every field.

    Args:
        owner: The dataclass of the options.
        name: The function's keyword parameter for them.
    """

    def decorate(function: Callable[..., _Result]) -> Callable[..., _Result]:
        fields = dataclasses.fields(owner)
        parameters = {**inspect.signature(function).parameters}
        is_positional = parameters[name].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        place = list(parameters).index(name)

        @functools.wraps(function)
        def accepting(*args: Any, **keywords: Any) -> _Result:
            given = {field.name: keywords.pop(field.name) for field in fields if field.name in keywords}
            if is_positional and len(args) == place + 1:  # The last of the positional parameters.
                args, keywords[name] = args[:-1], args[-1]
            options = keywords.pop(name, None)
            settled = owner(**given) if options is None else dataclasses.replace(options, **given)
            return function(*args, **{name: settled}, **keywords)

        signature = inspect.signature(function)
        parameters[name] = parameters[name].replace(default=None, annotation=owner | None)
        for field in fields:
            default = inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default
            parameters[field.name] = inspect.Parameter(
                field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=field.type
            )
        accepting.__signature__ = signature.replace(parameters=[*parameters.values()])  # type: ignore[attr-defined]
        return accepting

    return decorate


def check_numbers(options: Any) -> None:
    """Raise if a number is out of range or below its declared minimum.

    Args:
        options: A dataclass; its fields with an int or a float are checked.
    """
    declared = options_of(type(options))
    for field in dataclasses.fields(options):
        value, most = getattr(options, field.name), _MOST.get(field.name, _OTHERS)
        if not isinstance(value, int | float) or isinstance(value, bool):
            continue
        if not abs(value) <= most or (field.name == "seed" and value < 0):  # The first comparison is false for NaN.
            least = "0" if field.name == "seed" else f"-{most}"
            raise CtxextError(f'{field.name} must be a number from {least} to {most}, not "{value}".')
        smallest = declared[field.name].min if field.name in declared else None
        if smallest is not None and value < smallest:
            raise CtxextError(f"{field.name} must be at least {smallest:g}, not {value}.")
