"""The exception for invalid user input; any other exception is a bug in ctxext.

Any function may raise it for an input that it refuses; docstrings repeat this only in the public Python API.
"""

from ctxext.redaction import redact


class CtxextError(Exception):
    """A problem in the user's input: a one-line message and a hint, without secrets.

    Args:
        message: What happened, with the offending value in quotes.
        hint: What to do, best as a command; empty if nothing helps.
    """

    def __init__(self, message: str, hint: str = "") -> None:
        self.message, self.hint = redact(message), redact(hint)
        super().__init__(self.message)


class NothingMeasuredError(CtxextError):
    """A search or a comparison that measured nothing, usually because the time was too short."""
