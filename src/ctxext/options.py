"""Options of commands, declared once as fields of a dataclass.

The command line, the class's documentation and the range checks are generated from these declarations.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ctxext.errors import CtxextError

_MOST: Mapping[str, int] = {
    "seed": 2**32 - 1,  # numpy's maximum.
    "timeout": 1_000_000,  # Seconds; sockets accept no more than about 10^10.
    "num_concurrent": 1000,
    "steps": 10_000_000,  # All steps are validated before the first.
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
        panel: The group of options in help; the first group if empty.
        flags: The flags, if they differ from the field's name.
        kind: The format of the value if typer does not parse the field's type: "length" (tokens, such as 32k),
            "lengths" or "names" (several, with commas), "depths" or "json"; the class parses the last two.
        shown: The default in help for an option with a kind.
        min: The minimum.
        repeats: Whether the option may be repeated.
        metavar: The placeholder of the value in help.
        advanced: Whether only `--help-all` shows the option.
        kept: Whether option files contain it. Options of a single call, such as --overwrite, are excluded.
        missing: Message and hint of the error if a required option is missing.
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


def option(default: Any = dataclasses.MISSING, *, help: str, repr: bool = True, **settings: Any) -> Any:
    """Declare a dataclass field that is an option of a command; `Option` describes the other arguments."""
    return dataclasses.field(default=default, repr=repr, metadata={_KEY: Option(help=help, **settings)})


def original_length_option(**settings: Any) -> Any:
    """Declare the field of a model's original context length."""
    text = "Original context length, for example 32k. Overrides the value read from the checkpoint."
    return option(None, help=text, kind="length", **settings)


def target_length_option() -> Any:
    """Declare the field of the target context length."""
    missing = "Missing option --target-length.", "Add it, for example --target-length 32k."
    return option(help="Target context length, e.g. 32k.", kind="length", missing=missing)


def options_of(owner: type) -> dict[str, Option]:
    """Return the options of a dataclass by the names of their fields, in order."""
    return {field.name: field.metadata[_KEY] for field in dataclasses.fields(owner) if _KEY in field.metadata}


def flag_of(owner: type, name: str) -> str:
    """Return the first flag of an option of a dataclass."""
    return next(iter(options_of(owner)[name].flags), option_name(name))


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
        None, help="Hub token. Default: the token of hf auth login.", panel="Hub", kept=False, repr=False
    )


def accepts_options(owner: type, name: str = "options") -> Callable[[Callable[..., _Result]], Callable[..., _Result]]:
    """Accept a function's options as an object, as keywords, or both; keywords override fields of the object.

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
            values = {field.name: keywords.pop(field.name) for field in fields if field.name in keywords}
            if is_positional and len(args) == place + 1:  # The options are the last positional parameter.
                args, keywords[name] = args[:-1], args[-1]
            options = keywords.pop(name, None)
            options = owner(**values) if options is None else dataclasses.replace(options, **values)
            return function(*args, **{name: options}, **keywords)

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
        options: A dataclass; its integer and float fields are checked.
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
