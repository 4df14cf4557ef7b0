"""A method's parameter: its default, its limits and its help, declared once on the dataclass field.

The command line, the recipe files, the docs page and the search space are all read from these declarations.
"""

import dataclasses
import functools
import typing
from typing import Any

from ctxext.errors import CtxextError
from ctxext.files.length import parse_length

_LARGEST = 1e30
"""Largest value, so that all results stay finite; the same as for untrusted files."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits and description of a parameter.

    Attributes:
        help: One sentence for the user.
        min: The smallest legal value.
        max: The largest legal value.
        choices: The legal words of a text parameter.
        search: The range or the values that a search tries.
        usual: The value that replaces None. For a required parameter, the paper's value, which a search tries
            first.
        measured: Whether it is measured: it is stored in recipe files and is not a command-line option.
    """

    help: str
    min: float | None = None
    max: float | None = None
    choices: tuple[str, ...] = ()
    search: tuple[Any, ...] = ()
    usual: Any = None
    measured: bool = False

    def describe(self) -> str:
        """Return the help sentence with the limits written out."""
        parts = [" or ".join(self.choices)] if self.choices else []
        if self.min is not None:
            parts.append(f"at least {self.min:g}")
        if self.max is not None:
            parts.append(f"at most {self.max:g}")
        return f"{self.help} ({', '.join(parts)})" if parts else self.help


def param(default: Any = dataclasses.MISSING, **limits: Any) -> Any:
    """Declare a method's parameter, required if it has no default; `Limits` describes the other arguments."""
    return dataclasses.field(default=default, metadata={"limits": Limits(**limits)})


def limits_of(field: "dataclasses.Field[Any]") -> Limits:
    """Return the declaration behind a dataclass field created by `param`."""
    limits = field.metadata["limits"]
    assert isinstance(limits, Limits)
    return limits


def default_of(field: "dataclasses.Field[Any]") -> Any:
    """Return the default of a parameter; `dataclasses.MISSING` if it is required."""
    return limits_of(field).usual if field.default is None else field.default


def options_of(owner: type) -> "list[dataclasses.Field[Any]]":
    """Return the parameters of a method that are command-line options."""
    return [field for field in dataclasses.fields(owner) if not limits_of(field).measured]


@dataclasses.dataclass(frozen=True)
class SearchRange:
    """Values that a search tries for one parameter of a method.

    Attributes:
        values: The smallest and the largest number, or the words to choose from.
        start: The published value, which is tried first; None if there is none.
        optional: Whether some trials omit the parameter and use the method's rule.
    """

    values: tuple[Any, ...]
    start: Any = None
    optional: bool = False

    @property
    def is_choice(self) -> bool:
        """Whether the parameter is a choice rather than a numeric range."""
        return isinstance(self.values[0], str)


def search_ranges(owner: type) -> dict[str, SearchRange]:
    """Return the search ranges that a method declares, by parameter."""
    return {
        field.name: SearchRange(
            limits_of(field).search, search_start(owner, field.name), optional=default_of(field) is None
        )
        for field in options_of(owner)
        if limits_of(field).search
    }


def search_start(owner: type, name: str) -> Any:
    """Return the published value of a parameter: its default, or the paper's value if it is required."""
    (field,) = (field for field in dataclasses.fields(owner) if field.name == name)
    default = default_of(field)
    return limits_of(field).usual if default is dataclasses.MISSING else default


_types = functools.cache(typing.get_type_hints)  # Reading annotations is slow.


def value_type(owner: type, name: str) -> Any:
    """Return the type of a parameter's value, without the None of an unset one."""
    hint = _types(owner)[name]
    members = typing.get_args(hint)
    return members[0] if type(None) in members else hint


def check_value(owner: type, label: str, field: "dataclasses.Field[Any]", value: Any) -> Any:
    """Return a parameter's value in its declared type; raise if it has another type or violates a limit."""
    limits, expected = limits_of(field), value_type(owner, field.name)
    option = f"{label}: {field.name}"
    if value is None:
        if type(None) not in typing.get_args(_types(owner)[field.name]):
            raise CtxextError(f"{option} must have a value.", hint="Omit it to use the default.")
        return None
    if expected is bool or expected is str:
        if not isinstance(value, expected):
            raise CtxextError(f'{option} must be {"true or false" if expected is bool else "a word"}, not "{value}".')
    elif typing.get_origin(expected) is tuple:
        inner = typing.get_args(expected)[0]
        if typing.get_origin(inner) is not tuple:
            return _check_numbers(option, value)
        rows = value if isinstance(value, list | tuple) else [value]
        return tuple(_check_numbers(option, row, typing.get_args(inner)[0]) for row in rows)
    else:
        if isinstance(value, str) and field.name.endswith("_length"):
            value = parse_length(value)
        value = _check_number(option, value, expected)
    if limits.choices and value not in limits.choices:
        raise CtxextError(f'{option} must be one of {", ".join(limits.choices)}, not "{value}".')
    if limits.min is not None and value < limits.min:
        raise CtxextError(f'{option} must be at least {limits.min:g}, not "{value:g}".')
    if limits.max is not None and value > limits.max:
        raise CtxextError(f'{option} must be at most {limits.max:g}, not "{value:g}".')
    return value


def _check_number(option: str, value: Any, expected: type) -> Any:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not abs(value) <= _LARGEST:  # Also false for NaN.
        raise CtxextError(f'{option} must be a finite number of at most {_LARGEST:g}, not "{value}".')
    if expected is int and value != int(value):
        raise CtxextError(f'{option} must be a whole number, not "{value}".')
    return expected(value)


def _check_numbers(option: str, value: Any, expected: type = float) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple) or not value:
        raise CtxextError(f"{option} must be a list of numbers.")
    return tuple(_check_number(option, number, expected) for number in value)
