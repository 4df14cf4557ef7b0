"""The last resort: what ended a command and no part of it has told becomes one line too, with where it arose."""

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
"""The variable that asks for the whole traceback, for whoever looks for the fault."""

FAULT = "This is a fault of ctxext, not yours"
"""How the line begins; nothing that a user gives may lead to it, and the fuzzed tests hold that."""

NO_MEMORY = "There is not enough memory for this."
TOO_DEEP = "Something that was given nests too deep."

_PACKAGE = Path(__file__).parents[1]
_SHORT = 300
"""Characters of an exception's own message that are shown."""


def print_fault(error: BaseException) -> None:
    """Tell what ended a command in one line; the traceback stands before it where that was asked for."""
    if os.environ.get(TRACEBACK):
        lines = "".join(traceback.format_exception(error)).splitlines()
        # A stranger's words may stand in it, and tokens.
        sys.stderr.write("".join(f"{visible(line)}\n" for line in lines))
    print_error(as_error(error))


def as_error(error: BaseException) -> CtxextError:
    """The line of an exception, and what to do about it."""
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
    """Whether it is one of torch's ways of saying that memory is full."""
    return type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error)


def _origin(error: BaseException) -> str:
    """The last place in this package on the way to where it was raised."""
    places = [(Path(frame.filename), frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    inside = [(path.relative_to(_PACKAGE), line) for path, line in places if _PACKAGE in path.parents]
    return "{}:{}".format(*inside[-1]) if inside else "outside the package"


def tell_everywhere() -> None:
    """Make what is raised where nobody waits for it be told likewise: in threads, while objects are taken down."""
    threading.excepthook = lambda raised: _print_beside(raised.exc_value)
    sys.unraisablehook = lambda raised: _print_beside(raised.exc_value)


def _print_beside(error: BaseException | None) -> None:
    """Tell of an exception that ends nothing, where somebody looks for faults."""
    if error is not None and os.environ.get(TRACEBACK):
        with contextlib.suppress(Exception):  # The streams may be gone, and this is called where nothing may be raised.
            print_fault(error)
