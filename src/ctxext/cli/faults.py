"""The last resort: an exception that no part of a command handles is reported in one line, with its place."""

import contextlib
import os
import sys
import threading
import traceback
from pathlib import Path

from ctxext.cli.output import print_error
from ctxext.cli.terminal import in_one_line, visible
from ctxext.errors import CtxextError

TRACEBACK = "CTXEXT_TRACEBACK"
"""The environment variable that shows the whole traceback, for debugging."""

FAULT = "This is a fault of ctxext, not yours"
"""How the line begins. No input of a user may lead to it, which the fuzz tests check."""

NO_MEMORY = "There is not enough memory for this."
TOO_DEEP = "Something that was given nests too deep."

_PACKAGE = Path(__file__).parents[1]
_SHORT = 300
"""Characters of an exception's message that are shown."""


def print_fault(error: BaseException) -> None:
    """Print the exception that ended a command in one line, after the traceback if that was asked for."""
    if os.environ.get(TRACEBACK):
        lines = "".join(traceback.format_exception(error)).splitlines()
        # A stranger's words may stand in it, and tokens.
        sys.stderr.write("".join(f"{visible(line)}\n" for line in lines))
    print_error(as_error(error))


def as_error(error: BaseException) -> CtxextError:
    """An exception as an error with a hint."""
    where = f"{TRACEBACK}=1 shows where."
    if isinstance(error, MemoryError) or _lacks_memory(error):
        return CtxextError(NO_MEMORY, hint=f"Choose a smaller model, batch, length or dtype. {where}")
    if isinstance(error, RecursionError):
        return CtxextError(TOO_DEEP, hint=where)
    if isinstance(error, OSError) and error.strerror:
        file = f'"{error.filename}": ' if error.filename else ""
        return CtxextError(f"{file}{error.strerror}.", hint=f"Check the place and its permissions. {where}")
    said = ": ".join(part for part in (type(error).__name__, in_one_line(str(error), _SHORT)) if part)
    return CtxextError(
        f"{FAULT}: {said} ({_origin(error)}).",
        hint=f"Please report it with what {TRACEBACK}=1 shows and, if you may, the file that leads to it.",
    )


def _lacks_memory(error: BaseException) -> bool:
    """Whether an exception means that memory is full, as torch reports it."""
    return type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error)


def _origin(error: BaseException) -> str:
    """The last place of this package in the traceback."""
    places = [(Path(frame.filename), frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    inside = [(path.relative_to(_PACKAGE), line) for path, line in places if _PACKAGE in path.parents]
    return "{}:{}".format(*inside[-1]) if inside else "outside the package"


def tell_everywhere() -> None:
    """Handle exceptions in threads and finalizers in the same way."""
    threading.excepthook = lambda raised: _print_beside(raised.exc_value)
    sys.unraisablehook = lambda raised: _print_beside(raised.exc_value)


def _print_beside(error: BaseException | None) -> None:
    """Print an exception that ends no command, when debugging."""
    if error is not None and os.environ.get(TRACEBACK):
        with contextlib.suppress(Exception):  # The streams may be gone, and this is called where nothing may be raised.
            print_fault(error)
