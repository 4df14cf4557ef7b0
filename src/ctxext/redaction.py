"""Remove secrets from all output and from error messages."""

import re
from collections.abc import Sequence
from typing import Any

_TOKEN = re.compile(r"((?<![A-Za-z0-9]_)hf_|hf_(?=[A-Za-z0-9]{20})|api_org_|Bearer\s+)[^\s'\"\\)]+")
"""A token: 34 letters and digits after its prefix. File names such as convert_hf_to_gguf.py contain "hf" as a word."""
_OF_A_URL = re.compile(r"((?:[A-Za-z][\w+.\-]*:/{0,3}|(?<![^\s'\"(])/{0,2})[^\s/:@'\"\[]*):(?!//)([^\s'\"]+)@")
"""The password before the host: up to the last @, as a password may contain / and @; slashes may be missing."""

_PORT = r"(?!\d{1,5}(?![^\s/?#'\",;)\]}]))[^\s/?#'\"]+"
_WITHOUT_HOST = re.compile(rf"([A-Za-z][\w+.\-]+:/+[^\s/:@'\"\[]+):(?!…){_PORT}")
_BEHIND_HOST = re.compile(rf"(:…@[\w.\-]*):{_PORT}")
"""Text instead of a port: a password without a host or after the host."""

_NAMED = re.compile(
    r"(?i)(?<![\w-])((?:--)?[\w-]*(?:password|passwd|passphrase|pwd|secret|api[_-]?key|access[_-]?key)|"
    r"(?:--)?(?:hub[_-]|hf[_-]|access[_-]|auth[_-])?token)=([^\s&;'\"]+)"
)
"""A secret after its name, as in the query of a URL."""

_SHORTEST = 8
"""Minimum length of a redacted secret; shorter texts may occur in a message by chance."""

_STYLE = re.compile(r"(\x1b\[[\d;?]*[A-Za-z])")
"""Terminal sequences for colours or cursor movements; they end a word."""

SECRET_FLAGS = ("--token", "--api-key")
"""Options with a secret."""

_secrets: set[str] = set()


def remember(*secrets: str | None) -> None:
    """Redact these secrets in all later output, except short ones, which may be words of a message."""
    _secrets.update(secret for secret in secrets if secret and len(secret) >= _SHORTEST)


def remember_arguments(words: Sequence[str]) -> None:
    """Remember the token and the key of a command line, as errors about other arguments may contain them."""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        flag, equals, value = word.partition("=")
        if flag in SECRET_FLAGS:
            remember((value if equals else following).strip())


def redact(text: str) -> str:
    """Return a text with tokens, passwords and everything that looks like them redacted."""
    for secret in sorted(_secrets, key=len, reverse=True):
        text = text.replace(secret, "…")
    if ":" in text:
        if "@" in text:
            text = _BEHIND_HOST.sub(r"\1:…", _OF_A_URL.sub(r"\1:…@", text))
        if ":/" in text:
            text = _WITHOUT_HOST.sub(r"\1:…", text)
    if "=" in text:
        text = _NAMED.sub(r"\1=…", text)
    return _TOKEN.sub(r"\1…", text)


class RedactedStream:
    """A stream that removes secrets from all output, including that of libraries, warnings and tracebacks.

    Args:
        stream: The stream that receives the output.
    """

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def write(self, text: str) -> Any:
        """Write a text without its secrets; the pieces between terminal styles are redacted separately."""
        return self.stream.write("".join(map(redact, _STYLE.split(text))))

    def writelines(self, lines: Sequence[str]) -> None:
        """Write several texts."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)
