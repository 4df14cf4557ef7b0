"""The exception for invalid user input; any other exception is a bug in ctxext.

Any function may raise it; only docstrings of the public Python API mention it.
"""

import difflib
from collections.abc import Iterable

from ctxext.redaction import redact


class CtxextError(Exception):
    """Error in the user's input, with a one-line message and a hint, without secrets.

    Args:
        message: The problem, with the invalid value in quotes.
        hint: The solution, preferably as a command; empty if there is none.
    """

    def __init__(self, message: str, hint: str = "") -> None:
        self.message, self.hint = redact(message), redact(hint)
        super().__init__(self.message)


class NothingMeasuredError(CtxextError):
    """Error of a search or a comparison without measurements, usually because the time was too short."""


def suggest(name: str, known: Iterable[str], otherwise: str) -> str:
    """Return the hint for an unknown name: the most similar known one, or another hint if none is similar."""
    near = difflib.get_close_matches(name, known, n=1)
    return f'Did you mean "{near[0]}"?' if near else otherwise
