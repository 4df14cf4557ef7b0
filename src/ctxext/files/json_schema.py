"""JSON Schemas of the YAML files that users write, for editors. They are derived from the declared options."""

import importlib.metadata
import typing
from collections.abc import Mapping
from typing import Any

from ctxext.files.length import LENGTH
from ctxext.options import Option, declared_options, value_type
from ctxext.version import __version__

_DRAFT = "http://json-schema.org/draft-07/schema#"
"""The newest draft that the YAML extensions of editors support completely."""
_NAMES = {bool: "boolean", str: "string", int: "integer", float: "number"}
RECIPE, OPTIONS = "recipe", "finetune"
"""Names of the schemas in docs/schemas."""


def file_schema(title: str, **rules: Any) -> dict[str, Any]:
    """Return the schema of a file that contains an object.

    Args:
        title: The kind of file.
        rules: Further keywords of the schema.
    """
    return {"$schema": _DRAFT, "title": f"{title} of ctxext", "type": "object", **rules}


def closed_object(properties: Mapping[str, Any], required: list[str]) -> dict[str, Any]:
    """Return the keywords of an object without other keys."""
    return {"properties": dict(properties), "required": required, "additionalProperties": False}


def value_schema(owner: type, name: str, *, nullable: bool) -> dict[str, Any]:
    """Return the schema of an option's value in a file.

    Args:
        owner: The dataclass that declares the option.
        name: The option's field.
        nullable: Whether null means the default.
    """
    option, expected = declared_options(owner)[name], value_type(owner, name)
    default = owner.__dataclass_fields__[name].default  # type: ignore[attr-defined]
    described: dict[str, Any] = {"description": option.help}
    if isinstance(default, bool | int | float | str):
        described["default"] = default
    if option.choices:
        return {**described, "enum": [*option.choices, *([None] if nullable else [])]}
    null = ["null"] if nullable else []
    if option.repeats or option.kind == "names":
        return {**described, "type": ["string", "array", *null], "items": {"type": "string"}}
    if option.kind == "json":
        return {**described, "type": ["array", *null], "items": {"type": "object"}}
    if typing.get_origin(expected) is tuple:
        return {**described, **_list_schema(expected, null)}
    kind = [_NAMES[expected], *(["string"] if option.kind == "length" else []), *null]
    schema = {**described, "type": kind if len(kind) > 1 else kind[0]}
    if expected in (int, float):
        schema |= _limits_schema(option)
    if option.kind == "length":
        schema |= {"pattern": f"^{LENGTH.pattern}$", "patternErrorMessage": "Use for example 32768, 32k or 1M."}
    return schema


def _limits_schema(option: Option) -> dict[str, float]:
    """Return the limits of a number."""
    most = option.largest if option.max is None else option.max
    least = -most if option.min is None else option.min
    return {
        **({"minimum": least} if option.above is None else {"exclusiveMinimum": option.above}),
        **({"maximum": most} if option.below is None else {"exclusiveMaximum": option.below}),
    }


def _list_schema(expected: Any, null: list[str]) -> dict[str, Any]:
    """Return the schema of a list of numbers, or of lists of numbers."""
    inner = typing.get_args(expected)[0]
    if typing.get_origin(inner) is tuple:
        return {"type": ["array", *null], "items": _list_schema(inner, [])}
    return {"type": ["array", *null], "items": {"type": _NAMES[inner]}, "minItems": 1}


def schema_line(name: str) -> str:
    """Return the comment by which editors find the schema of a YAML file.

    It is empty if the installed package does not contain the address of its repository (hatch_build.py).
    """
    try:
        entries = importlib.metadata.metadata("ctxext").get_all("Project-URL") or []
    except importlib.metadata.PackageNotFoundError:
        entries = []
    address = dict(entry.split(", ", 1) for entry in entries).get("Repository")
    place = f"{address}/raw/v{__version__}/docs/schemas/{name}.json"
    return f"# yaml-language-server: $schema={place}\n" if address else ""
