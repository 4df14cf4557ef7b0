"""Packages whose names are imported when they are asked for, and packages that are called like their main function."""

import importlib
import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

_IMPORT = re.compile(r"^    from (\S+) import (\w+) as \w+$", re.MULTILINE)


class Package(ModuleType):
    """A package that may be called, where it has a function of its own name."""

    _main = ""
    _names: Mapping[str, str] = {}

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        """Call the package's main function."""
        return self._function()(*args, **keywords)

    def _function(self) -> Callable[..., Any]:
        if not self._main:
            raise TypeError(f"{self.__name__} cannot be called")
        function: Callable[..., Any] = getattr(self, self._main)
        return function

    @property
    def __signature__(self) -> inspect.Signature:
        """The signature of the main function, for help and completion."""
        return inspect.signature(self._function())


def hand_on(package: str, *, main: str = "", packages: Sequence[str] = ()) -> list[str]:
    """Let names be imported from a package without importing their modules before somebody does.

    They are those that the package's file imports for type checkers, by `from module import name as name`. Where a
    module of the package has the name of a function, the name is the function's, in whatever order the two are
    imported: importing a submodule sets an attribute of its package, which is passed over here.

    Args:
        package: The package that calls this, its `__name__`.
        main: The function that is called where the package itself is.
        packages: Packages inside this one that are imported in the same way.

    Returns:
        All names, sorted.
    """
    file = Path(str(sys.modules[package].__file__))
    imports = _IMPORT.findall(file.read_text(encoding="utf-8"))
    names = {name: module for module, name in imports if name not in packages}
    members = {name: _member(package, name, module) for name, module in names.items()}
    inside = {name: _inside(package, name) for name in packages}
    shown = sorted({*names, *packages})
    kept = {**inside, "_main": main, "_names": names, "__dir__": lambda module: [*ModuleType.__dir__(module), *shown]}
    sys.modules[package].__class__ = type("Package", (Package,), {**members, **kept})
    return shown


def _member(package: str, name: str, module: str) -> property:
    """An attribute that imports its value; what tests put in its place stays until they take it back."""
    values: dict[str, Any] = {}

    def value(self: ModuleType) -> Any:
        if name not in values:
            values[name] = getattr(importlib.import_module(module), name)
        return values[name]

    def assign(self: ModuleType, new: Any) -> None:
        if not (isinstance(new, ModuleType) and new.__name__ == f"{package}.{name}"):
            values[name] = new

    return property(value, assign, lambda self: values.clear())


def _inside(package: str, name: str) -> property:
    """A package inside a package, which is the same object however it was imported."""

    def value(self: ModuleType) -> ModuleType:
        return importlib.import_module(f"{package}.{name}")

    return property(value, lambda self, new: None)
