"""A schema as annotations: what each key of a file must be, checked without converting anything.

The rules are those of pydantic's strict mode. Only plain JSON is read here, which needs nothing that takes long to
import: most commands read a file or two.
"""

import functools
import inspect
import math
import re
import sys
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

MAY_BE_MISSING: Any = None
"""The default of a key that may be left out, and whose value may still not be null."""


@dataclass(frozen=True)
class Limits:
    """What a value of the annotated type must satisfy.

    Attributes:
        ge: The smallest number.
        gt: What a number must be above.
        le: The largest number.
        min_length: The fewest entries or characters.
        max_length: The most entries or characters.
        pattern: What a word must match.
        finite: Whether a number must be finite.
    """

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    min_length: int | None = None
    max_length: int | None = None
    pattern: str | None = None
    finite: bool = False


class Fault(NamedTuple):
    """Where a content is not what its schema says.

    Attributes:
        place: The keys and indices that lead to it.
        expected: What it must be; empty where a key is missing.
        value: What is there.
    """

    place: tuple[Any, ...]
    expected: str
    value: Any


_LARGEST = sys.float_info.max
"""A whole number that is larger is no float."""

Check = Callable[[Any], Fault | None]


class Schema:
    """An object of a file, or a part of one; a key with a default may be left out, and unnamed keys are not read."""

    @classmethod
    def names(cls) -> list[str]:
        """The keys that are read."""
        return list(_annotations(cls))

    @classmethod
    def missing(cls, content: Mapping[str, Any]) -> str:
        """What the keys must be together and are not; empty where they are. They are right one by one."""
        return ""


def fault_of(content: Any, schema: type[Schema]) -> Fault | None:
    """The first place where a content is not what a schema says; None where there is none."""
    return _check_of(typing.cast("Any", schema))(content)


def _annotations(schema: type[Schema]) -> dict[str, Any]:
    """The keys of a schema and of what it inherits, in the order in which they are declared."""
    owners = [owner for owner in reversed(schema.__mro__) if issubclass(owner, Schema)]
    return {key: kind for owner in owners for key, kind in inspect.get_annotations(owner, eval_str=True).items()}


@functools.cache
def _check_of(kind: Any) -> Check:
    """The check of a type: a schema, a JSON type, a list, a dict, a union, or one of them with `Limits`."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return lambda value: None
    if origin is Annotated:
        return _limited(_check_of(arguments[0]), arguments[1])
    if origin in (typing.Union, types.UnionType):
        return _one_of([_check_of(argument) for argument in arguments])
    if origin is list:
        return _list_of(_check_of(arguments[0]))
    if origin is dict:
        return _dict_of(_check_of(arguments[0]), _check_of(arguments[1]))
    if isinstance(kind, type) and issubclass(kind, Schema):
        return _object_of(kind)
    return _PLAIN[kind]


def _of_type(accepted: type, expected: str, *, but: type | None = None) -> Check:
    fault = Fault((), expected, None)

    def check(value: Any) -> Fault | None:
        right = isinstance(value, accepted) and not (but is not None and isinstance(value, but))
        return None if right else fault._replace(value=value)

    return check


def _number(value: Any) -> Fault | None:
    if isinstance(value, float):
        return None
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    return None if is_whole and abs(value) <= _LARGEST else Fault((), "a valid number", value)


_PLAIN: Mapping[Any, Check] = {
    int: _of_type(int, "a valid integer", but=bool),
    float: _number,
    bool: _of_type(bool, "a valid boolean"),
    str: _of_type(str, "a valid string"),
    type(None): _of_type(type(None), "null"),
}


def _limited(check_type: Check, limits: Limits) -> Check:
    pattern = limits.pattern and re.compile(limits.pattern)
    least, most = limits.min_length or 0, math.inf if limits.max_length is None else limits.max_length

    def expected(value: Any) -> str:
        # NaN satisfies none of them.
        if limits.ge is not None and not value >= limits.ge:
            return f"greater than or equal to {limits.ge}"
        if limits.gt is not None and not value > limits.gt:
            return f"greater than {limits.gt}"
        if limits.le is not None and not value <= limits.le:
            return f"less than or equal to {limits.le}"
        if limits.finite and not abs(value) <= _LARGEST:
            return "a finite number"
        if pattern and not pattern.fullmatch(value):
            return f"a match of {limits.pattern}"
        if isinstance(value, str | list | dict) and not least <= len(value) <= most:
            unit = "characters" if isinstance(value, str) else "entries"
            return f"at least {least} {unit}" if len(value) < least else f"at most {most} {unit}"
        return ""

    def check(value: Any) -> Fault | None:
        fault = check_type(value)
        if fault is None and (wanted := expected(value)):
            return Fault((), wanted, value)
        return fault

    return check


def _one_of(checks: list[Check]) -> Check:
    def check(value: Any) -> Fault | None:
        first: Fault | None = None
        for one in checks:
            fault = one(value)
            if fault is None:
                return None
            first = first or fault
        return first

    return check


def _list_of(check_entry: Check) -> Check:
    is_list = _of_type(list, "a valid list")

    def check(value: Any) -> Fault | None:
        if fault := is_list(value):
            return fault
        for index, entry in enumerate(value):
            if fault := check_entry(entry):
                return fault._replace(place=(index, *fault.place))
        return None

    return check


_is_object = _of_type(dict, "an object")


def _dict_of(check_key: Check, check_entry: Check) -> Check:
    def check(value: Any) -> Fault | None:
        if fault := _is_object(value):
            return fault
        for key, entry in value.items():
            if fault := check_key(key) or check_entry(entry):
                return fault._replace(place=(key, *fault.place))
        return None

    return check


def _object_of(schema: type[Schema]) -> Check:
    checks = {key: (_check_of(kind), hasattr(schema, key)) for key, kind in _annotations(schema).items()}

    def check(value: Any) -> Fault | None:
        if fault := _is_object(value):
            return fault
        for key, (check_entry, may_be_missing) in checks.items():
            if key not in value:
                if may_be_missing:
                    continue
                return Fault((key,), "", value)
            if fault := check_entry(value[key]):
                return fault._replace(place=(key, *fault.place))
        expected = schema.missing(value)
        return Fault((), expected, value) if expected else None

    return check
