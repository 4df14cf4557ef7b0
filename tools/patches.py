"""Puts a mutant's code in the place of a function's that is loaded already: quicker than to load everything anew."""

import functools
import gc
import sys
from pathlib import Path
from types import CodeType, FunctionType


def patched(before: str, after: str) -> dict[str, CodeType] | None:
    """The functions of a file whose code a change makes another, by qualified name.

    Args:
        before: The file's text.
        after: The file's text, changed.

    Returns:
        Their new code; None where what runs on import changes too.
    """
    found: dict[str, CodeType] = {}
    old, new = (compile(text, "file", "exec") for text in (before, after))
    return found if _differ_within(old, new, found) else None


def apply(path: Path, codes: dict[str, CodeType] | None) -> None:
    """Replace the code of functions that are loaded, and forget what they had kept.

    Args:
        path: The file that they were loaded from; one that is not loaded yet is left to be.
        codes: Their new code by qualified name; None or empty leaves all as it is.

    Raises:
        LookupError: the file is loaded and has no such function.
    """
    if not codes or str(path) not in [getattr(module, "__file__", None) for module in [*sys.modules.values()]]:
        return
    gc.unfreeze()  # conftest.py freezes what is loaded, which gc does not list then.
    things = gc.get_objects()
    for name, code in codes.items():
        functions = [
            thing
            for thing in things
            if type(thing) is FunctionType and thing.__code__.co_filename == str(path) and thing.__qualname__ == name
        ]
        if not functions:
            raise LookupError(f"{path} has no function {name} in memory")
        for function in functions:
            function.__code__ = code.replace(co_filename=str(path))
    for thing in things:
        if type(thing) is functools._lru_cache_wrapper:
            thing.cache_clear()


def _differ_within(old: CodeType, new: CodeType, found: dict[str, CodeType], inside: str = "") -> bool:
    """Whether all that differs lies in functions, which are noted; classes are looked into."""
    inner = [[c for c in code.co_consts if isinstance(c, CodeType)] for code in (old, new)]
    rest = [tuple(c for c in code.co_consts if not isinstance(c, CodeType)) for code in (old, new)]
    if len(inner[0]) != len(inner[1]) or repr(rest[0]) != repr(rest[1]) or old.co_code != new.co_code:
        return False
    if old.co_names != new.co_names:
        return False
    for one, other in zip(*inner, strict=True):
        if one.co_flags & 1:  # Optimized locals: a function.
            if one.co_freevars != other.co_freevars:
                return False
            if not _same(one, other):
                if other.co_name == "<lambda>" or inside + other.co_name in found:
                    return False  # Several go by that name.
                found[inside + other.co_name] = other
        elif not _differ_within(one, other, found, f"{inside}{other.co_name}."):
            return False
    return True


def _same(one: CodeType, other: CodeType) -> bool:
    """Whether two pieces of code do the same, lines apart."""
    if (one.co_code, one.co_names, one.co_varnames) != (other.co_code, other.co_names, other.co_varnames):
        return False
    if len(one.co_consts) != len(other.co_consts):
        return False
    return all(
        _same(a, b) if isinstance(a, CodeType) and isinstance(b, CodeType) else repr(a) == repr(b)
        for a, b in zip(one.co_consts, other.co_consts, strict=True)
    )
