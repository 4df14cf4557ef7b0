"""A method's parameter: its default, its limits and its help, declared once on the dataclass field.

The command line, the recipe files, the docs page and the search space are all read from these declarations.
"""

import dataclasses
import typing
from typing import Any, ClassVar

from ctxext.errors import CtxextError
from ctxext.files.length import parse_length
from ctxext.options import Option, declare, is_optional, option_of, value_type


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parameter(Option):
    """An option of a method. It is internal if it is measured: recipe files contain it, and the command does not.

    Attributes:
        search: The range or the values that a search tries.
        usual: The value that replaces None. For a required parameter, the paper's value, which a search tries
            first.
    """

    search: tuple[Any, ...] = ()
    usual: Any = None
    largest: ClassVar[float] = 1e30  # The same as for untrusted files.


def param(default: Any = dataclasses.MISSING, **settings: Any) -> Any:
    """Declare a method's parameter; `Parameter` and `Option` describe the other arguments."""
    return declare(Parameter(**settings), default)


def parameter_of(field: "dataclasses.Field[Any]") -> Parameter:
    """Return the declaration behind a dataclass field created by `param`."""
    declared = option_of(field)
    assert isinstance(declared, Parameter)
    return declared


def default_of(field: "dataclasses.Field[Any]") -> Any:
    """Return the default of a parameter; `dataclasses.MISSING` if it is required."""
    return parameter_of(field).usual if field.default is None else field.default


def parameters_of(owner: type) -> "list[dataclasses.Field[Any]]":
    """Return the parameters of a method that are command-line options."""
    return [field for field in dataclasses.fields(owner) if not parameter_of(field).internal]


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
            parameter_of(field).search, search_start(owner, field.name), optional=default_of(field) is None
        )
        for field in parameters_of(owner)
        if parameter_of(field).search
    }


def search_start(owner: type, name: str) -> Any:
    """Return the published value of a parameter: its default, or the paper's value if it is required."""
    (field,) = (field for field in dataclasses.fields(owner) if field.name == name)
    default = default_of(field)
    return parameter_of(field).usual if default is dataclasses.MISSING else default


def check_value(owner: type, label: str, field: "dataclasses.Field[Any]", value: Any) -> Any:
    """Return a parameter's value in its declared type; raise if it has another type or violates a limit."""
    declared, expected = parameter_of(field), value_type(owner, field.name)
    option = f"{label}: {field.name}"
    if value is None:
        if not is_optional(owner, field.name):
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
        if isinstance(value, str) and declared.kind == "length":
            value = parse_length(value)
        value = _check_number(option, value, expected)
    if declared.choices and value not in declared.choices:
        raise CtxextError(f'{option} must be one of {", ".join(declared.choices)}, not "{value}".')
    if not declared.allows(value):
        raise CtxextError(f'{option} must be {declared.limits}, not "{value:g}".')
    return value


def _check_number(option: str, value: Any, expected: type) -> Any:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not abs(value) <= Parameter.largest:  # Also false for NaN.
        raise CtxextError(f'{option} must be a finite number of at most {Parameter.largest:g}, not "{value}".')
    if expected is int and value != int(value):
        raise CtxextError(f'{option} must be a whole number, not "{value}".')
    return expected(value)


def _check_numbers(option: str, value: Any, expected: type = float) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple) or not value:
        raise CtxextError(f"{option} must be a list of numbers.")
    return tuple(_check_number(option, number, expected) for number in value)
