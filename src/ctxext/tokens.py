"""The one place that reads a Hub token, and the one that takes tokens out of whatever is shown or written."""

import re

from ctxext.errors import CtxextError

LOG_IN = "hf auth login, or --token with one that may write"
_LOOKS_LIKE_ONE = re.compile(r"(hf_|api_org_|Bearer\s+)[^\s'\"\\]+")
_SHORTEST = 8
"""Pieces that are shorter are words of their own, which a message may hold by chance."""

_given: set[str] = set()


def hub_token(token: str | None = None) -> str | None:
    """The token to show the Hub, None where there is none; it is remembered so that `redacted` knows it.

    Args:
        token: What the user gave; the client's own places are read where it is None or blank. Line ends around it, as
            `--token "$(cat FILE)"` of a Windows file leaves them, are taken away.

    Raises:
        CtxextError: it holds characters that no token has. The message does not show it.
    """
    from huggingface_hub import constants, get_token

    stored = None if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else get_token()
    found = (token or "").strip() or (stored or "").strip()
    if not found:
        return None
    _given.update(part for part in found.split() if len(part) >= _SHORTEST)
    if not re.fullmatch(r"[\x21-\x7e]+", found):
        raise CtxextError("The token holds characters that no token has.", hint=LOG_IN)
    return found


def redacted(text: str) -> str:
    """A text without anything that is, or looks like, a token."""
    for token in sorted(_given, key=len, reverse=True):
        text = text.replace(token, "…")
    return _LOOKS_LIKE_ONE.sub(r"\1…", text)
