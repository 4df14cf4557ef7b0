"""The methods: every class with a `name` in the files of recipes/methods."""

import importlib
import pkgutil

from ctxext.errors import CtxextError, suggest
from ctxext.recipes import methods
from ctxext.recipes.base import Method

_ORDER = (
    *("pi", "ntk", "abf", "ntk-by-parts", "yarn", "llama3", "longrope", "mrrope", "dynamic"),
    *("mspoe", "self-extend", "bifocal", "dca", "rerope", "adaptive", "sinks", "window", "distance-aware"),
    *("table", "range", "ntk-alibi", "buckets", "memory", "declare"),
)
"""The order of methods in help; other methods follow by name."""


def _find_methods() -> list[type[Method]]:
    classes: list[type[Method]] = []
    for file in pkgutil.iter_modules(methods.__path__, f"{methods.__name__}."):
        values = vars(importlib.import_module(file.name)).values()
        defined = [value for value in values if isinstance(value, type) and value.__module__ == file.name]
        classes += [cls for cls in defined if issubclass(cls, Method) and "name" in vars(cls)]
    return sorted(classes, key=lambda cls: (_ORDER.index(cls.name) if cls.name in _ORDER else len(_ORDER), cls.name))


METHODS = tuple(_find_methods())
"""The methods, in the order of help."""

BY_NAME = {key: method for method in METHODS for key in (method.name, *method.aliases)}
"""The methods by their names and aliases."""


def method_named(name: str) -> type[Method]:
    """Return the method class with a name or an alias."""
    if name.lower() in BY_NAME:
        return BY_NAME[name.lower()]
    hint = suggest(name.lower(), BY_NAME, f"Choose one of: {', '.join(m.name for m in METHODS)}.")
    raise CtxextError(f'There is no method "{name}".', hint=hint)
