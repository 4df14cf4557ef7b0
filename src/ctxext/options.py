"""Options of commands, declared once as fields of a dataclass.

The command line, the class's documentation and the range checks are generated from these declarations.
"""

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

from ctxext.errors import CtxextError

MAX_COUNT = 1_000_000
"""Maximum of counts such as samples."""
_LARGEST_SEED = 2**32 - 1
"""numpy's maximum."""

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
        above: A lower limit that is excluded.
        max: The maximum.
        below: An upper limit that is excluded.
        parser_checks: Whether the parser of the command line checks the minimum too, so that help shows it.
        choices: The words to choose from.
        invalid: Message of the error for a wrong value, if it is not the usual one; {value} stands for the value.
        hint: Hint of that error. By default it lists the choices.
        repeats: Whether the option may be repeated.
        metavar: The placeholder of the value in help.
        implied: The value of the flag alone, if it may be given without one.
        advanced: Whether only `--help-all` shows the option.
        kept: Whether option files contain it. Options of a single call, such as --overwrite, are excluded.
        missing: Message and hint of the error if a required option is missing.
        internal: Whether the field is not an option of the command, only of Python or of files.
    """

    help: str
    panel: str = ""
    flags: tuple[str, ...] = ()
    kind: str = ""
    shown: str | None = None
    min: float | None = None
    above: float | None = None
    max: float | None = None
    below: float | None = None
    parser_checks: bool = False
    choices: tuple[str, ...] = ()
    invalid: str = ""
    hint: str = ""
    repeats: bool = False
    metavar: str | None = None
    implied: str = ""
    advanced: bool = False
    kept: bool = True
    missing: tuple[str, str] | None = None
    internal: bool = False
    largest: ClassVar[float] = 10**10
    """Default maximum, so that results stay finite. For options of commands it is the longest context."""

    @property
    def limits(self) -> str:
        """The limits in words; empty if none is declared."""
        if (self.min, self.below) == (0, 1):
            return "a share from 0 to 1"
        limits = {"at least": self.min, "above": self.above, "at most": self.max, "below": self.below}
        return " and ".join(f"{word} {limit:g}" for word, limit in limits.items() if limit is not None)

    def allows(self, value: float) -> bool:
        """Return whether a number is within the limits."""
        return not (
            (self.min is not None and value < self.min)
            or (self.above is not None and value <= self.above)
            or (self.max is not None and value > self.max)
            or (self.below is not None and value >= self.below)
        )

    def describe(self) -> str:
        """Return the help sentence with the choices and the limits written out."""
        parts = [part for part in (" or ".join(self.choices), self.limits) if part]
        return f"{self.help} ({', '.join(parts)})" if parts else self.help


@dataclasses.dataclass(frozen=True)
class Rule:
    """A combination of options that is an error. A class lists its rules as `rules`.

    Attributes:
        find: Returns the part of the options that breaks the rule, or any true value; a false value if none does.
        message: Message of the error. {found} stands for the result of `find`, an option's name for its value.
        hint: Hint of the error, in the same form.
    """

    find: Callable[[Any], Any]
    message: str
    hint: str = ""


def declare(option: Option, default: Any = dataclasses.MISSING, *, repr: bool = True) -> Any:
    """Declare a dataclass field, required if it has no default."""
    return dataclasses.field(default=default, repr=repr, metadata={_KEY: option})


def option(default: Any = dataclasses.MISSING, *, help: str, repr: bool = True, **settings: Any) -> Any:
    """Declare a dataclass field that is an option of a command; `Option` describes the other arguments."""
    return declare(Option(help=help, **settings), default, repr=repr)


def original_length_option(**settings: Any) -> Any:
    """Declare the field of a model's original context length."""
    text = "Original context length, for example 32k. Overrides the value read from the checkpoint."
    return option(None, help=text, kind="length", **settings)


def target_length_option() -> Any:
    """Declare the field of the target context length."""
    missing = "Missing option --target-length.", "Add it, for example --target-length 32k."
    return option(help="Target context length, e.g. 32k.", kind="length", min=1, missing=missing)


def count_option(default: int | None, *, min: int = 1, **settings: Any) -> Any:
    """Declare the field of a count, such as a number of samples."""
    return option(default, min=min, max=MAX_COUNT, parser_checks=True, **settings)


def share_option(default: float | None, **settings: Any) -> Any:
    """Declare the field of a share, from 0 up to 1."""
    return option(default, min=0, below=1, **settings)


def seed_option(**settings: Any) -> Any:
    """Declare the field of the random seed."""
    invalid = f'--seed must be a number from 0 to {_LARGEST_SEED}, not "{{value}}".'
    return option(0, help="Random seed.", min=0, max=_LARGEST_SEED, invalid=invalid, **settings)


def strength_option(**settings: Any) -> Any:
    """Declare the field of the share of a training that is merged."""
    text = "Share of the trained change that is merged: less of its effect, and of its cost on other text (WiSE-FT, "
    return option(1.0, help=f"{text}arXiv 2109.01903).", above=0, max=1, metavar="SHARE", **settings)


def option_of(field: "dataclasses.Field[Any]") -> Option:
    """Return the declaration of a field."""
    declared = field.metadata[_KEY]
    assert isinstance(declared, Option)
    return declared


def declared_options(owner: type) -> dict[str, Option]:
    """Return all declarations of a dataclass by the names of their fields, in order; including internal ones."""
    return {field.name: option_of(field) for field in dataclasses.fields(owner) if _KEY in field.metadata}


def options_of(owner: type) -> dict[str, Option]:
    """Return the command-line options of a dataclass by the names of their fields, in order."""
    return {name: option for name, option in declared_options(owner).items() if not option.internal}


_types = functools.cache(typing.get_type_hints)  # Reading annotations is slow.


def value_type(owner: type, name: str) -> Any:
    """Return the type of an option's value, without the None of an unset one."""
    hint = _types(owner)[name]
    members = typing.get_args(hint)
    return members[0] if type(None) in members else hint


def is_optional(owner: type, name: str) -> bool:
    """Return whether an option may be None."""
    return type(None) in typing.get_args(_types(owner)[name])


def flag_of(owner: type, name: str) -> str:
    """Return the first flag of an option of a dataclass."""
    return next(iter(declared_options(owner)[name].flags), option_name(name))


def is_set(options: Any, name: str) -> bool:
    """Return whether an option differs from its default."""
    return bool(getattr(options, name) != getattr(type(options), name))


def with_documented_options(owner: _Class) -> _Class:
    """Add the help texts of a dataclass's options to its docstring."""
    lines = [f"    {name}: {option.help}" for name, option in declared_options(owner).items()]
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


def check_options(options: Any, form: str = "{flag} must be {limits}, not {value:g}.") -> None:
    """Raise if a number is out of range, a combination of options breaks a rule, or a word is not among the choices.

    Choices come last: an option that cannot be combined with another one is reported as such, whatever its value.

    Args:
        options: A dataclass with options and, optionally, `rules`.
        form: The message for a number that violates its limits, with {flag}, {limits} and {value}.
    """
    owner, declared = type(options), declared_options(type(options))
    for name, option in declared.items():
        _check_number(owner, name, option, getattr(options, name), form)
    for rule in getattr(owner, "rules", ()):
        if found := rule.find(options):
            values = {**vars(options), "found": found}
            raise CtxextError(rule.message.format(**values), hint=rule.hint.format(**values))
    for name, option in declared.items():
        value = getattr(options, name)
        if option.choices and value not in option.choices and not (value is None and is_optional(owner, name)):
            message = option.invalid or 'Unknown {flag} "{value}".'
            hint = option.hint or f"Choose {', '.join(option.choices)}."
            raise CtxextError(message.format(flag=flag_of(owner, name), value=value), hint=hint)


def _check_number(owner: type, name: str, option: Option, value: Any, form: str) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return
    most = option.largest if option.max is None else option.max
    is_in_range = abs(value) <= most  # False for NaN.
    if is_in_range and option.allows(value):
        return
    if not is_in_range:
        least = -most if option.min is None else option.min
        form = f'{{flag}} must be a number from {least} to {most}, not "{{value}}".'
    values = {"flag": flag_of(owner, name), "limits": option.limits, "value": value}
    raise CtxextError((option.invalid or form).format(**values), hint=option.hint)
