"""The one exception for what a user did wrong; every other is a fault of ours.

Any function may raise it for an input it refuses; docstrings repeat this only where they are part of the Python API.
"""

from ctxext.redaction import redacted


class CtxextError(Exception):
    """A problem in what the user gave us, told in one line with what to do about it, and without secrets.

    Args:
        message: What happened, with the offending value in quotes.
        hint: What to do, best as a command; empty where nothing helps.
    """

    def __init__(self, message: str, hint: str = "") -> None:
        self.message, self.hint = redacted(message), redacted(hint)
        super().__init__(self.message)


class NothingMeasuredError(CtxextError):
    """A search or a comparison that measured nothing, mostly as the time was too short."""
