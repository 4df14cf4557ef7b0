"""The JSON Schema of recipe files, derived from the declared parameters of the methods."""

import dataclasses
import inspect
from typing import Any

from ctxext.files.json_schema import closed_object, file_schema, value_schema
from ctxext.options import is_optional
from ctxext.recipes.base import Method
from ctxext.recipes.recipe import FILE_KEYS
from ctxext.recipes.registry import METHODS


def recipe_schema() -> dict[str, Any]:
    """Return the schema of recipe files.

    It checks names, types, limits and choices. Rules between parameters or steps are checked only by ctxext.
    """
    names = {method: [method.name, *method.aliases] for method in METHODS}
    step = {
        "type": "object",
        "properties": {"method": {"enum": [name for each in names.values() for name in each]}},
        "required": ["method"],
        "allOf": [
            {"if": {"properties": {"method": {"enum": each}}, "required": ["method"]}, "then": _step_schema(method)}
            for method, each in names.items()
        ],
    }
    texts = {key: {"type": "string"} for key in FILE_KEYS if key != "steps"}
    steps = {"type": "array", "items": step, "minItems": 1}
    return file_schema("Recipe", **closed_object({**texts, "steps": steps}, ["steps"]))


def _step_schema(method: type[Method]) -> dict[str, Any]:
    """Return the schema of a step of one method."""
    fields = dataclasses.fields(method)
    parameters = {
        field.name: value_schema(method, field.name, nullable=is_optional(method, field.name)) for field in fields
    }
    named = {"method": {"description": (inspect.getdoc(method) or "").splitlines()[0]}}
    return closed_object(
        {**named, **parameters}, [field.name for field in fields if field.default is dataclasses.MISSING]
    )
