"""The methods by class name, as in `from ctxext.methods import Yarn`; the registry lists them."""

from typing import Any

from ctxext.recipes.registry import METHODS

_CLASSES = {method.__name__: method for method in METHODS}
__all__ = sorted(_CLASSES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name not in _CLASSES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _CLASSES[name]
