"""Remove secrets from all output and from error messages, in time linear in the text."""

import base64
import functools
import html
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote, quote_plus, unquote

_TOKEN_MARKS = ("hf_", "api_org_", "sk-", "gh", "github_pat_", "glpat-", "Bearer", "asic ")
_TOKEN = re.compile(
    r"((?<![A-Za-z0-9]_)hf_(?=\w{0,40}?[A-Z0-9])|hf_(?=[A-Za-z0-9]{20})|api_org_|(?<!\w)(?:sk-|gh[oprsu]_|github_pat_|glpat-)(?=[\w-]{16})"
    r"|Bearer\s++|(?i:authorization[\\\"']*+:[\s\\\"']*+basic\s++))[^\s'\"\\)]++"
)
"""A token: 34 letters and digits after its prefix. Names such as convert_hf_to_gguf.py contain only words."""

_WORD = re.compile(r"(?<![^\s'\"])[^\s'\"@]*+@[^\s'\"]*+")
_USER = re.compile(r"(?:(?<![\w+.\-])[\w+.\-]++:/{0,3}|(?:^|(?<=\())/{0,2})[^/:@\[]*:(?!//)")
"""A word with @, and in it the beginning of a URL up to the password; slashes may be missing."""

_PORT = r"(?!\d{1,5}(?![^\s/?#'\",;)\]}\\]))(?:[^\s/?#'\"\\]|\\(?!['\"]))++"
_WITHOUT_HOST = re.compile(rf"(:(?<=[\w+.\-]{{2}}:)/++[^\s/:@'\"\[]++):(?!…){_PORT}")
_BEHIND_HOST = re.compile(rf"(:…@[\w.\-]*+):{_PORT}")
"""Text instead of a port: a password without a host or after the host."""

_NAME_MARKS = ("passw", "passphrase", "pwd", "secret", "credential", "key", "token")
_SECRET_NAME = (
    r"(?:password|passwd|passphrase|pwd|secret|credentials?|(?:api|access|private|secret)[_-]?key"
    r"|(?:(?:hub|hf|api|access|auth|secret|session|bearer)[_-]|(?<![\w-])(?:--)?)token)(?![\w-])"
)
_NAMED = re.compile(
    rf"(?is)({_SECRET_NAME}(?:(?P<key>\\*+[\"'])\s*+:\s*+|\s*+=\s*+|(?<!token):\s*+))"
    r"(?:(?P<open>\\*+[\"'])(?:(?!(?P=open))(?:\\.|[^\\]))++"
    r"|(?:Bearer\s++|Basic\s++)?(?(key)(?!null\b|true\b|false\b|none\b)(?:[^\s&;'\"\\\[{,}\]]|\\(?![\"']))++|(?:[^\s&;'\"\\]|\\(?![\"']))++))"
)
"""A secret after its name, as in the query of a URL, in JSON, or in the settings of a database."""

_VARIABLE = re.compile(
    r"(?i).*(?:passw(?:or)?d|passphrase|secret|credentials?|(?:api|access|private)_?key|(?<![a-z0-9])token)"
)
"""Names of environment variables for secrets."""

_SHORTEST, _SHORTEST_WORD = 8, 4
"""Minimum lengths of a redacted secret, anywhere and as a separate word; shorter ones occur in messages by chance."""

_STYLE = re.compile(r"(\x1b\[[\d;?]*+[A-Za-z])")
"""Terminal sequences for colours or cursor movements; they end a word."""
_OF_BARS = re.compile(r"[\n\r]*(?:\x1b\[A)*\r?")
"""Movements of the cursor between several progress bars, written on their own."""

_UNSEEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters, and characters that change the text direction; surrogates cannot be written at all."""

_BREAK = re.compile(r"[\s\x00-\x1f\x7f-\x9f]+")

SECRET_FLAGS = ("--token", "--api-key")
"""Options with a secret."""

_secrets: set[str] = set()


def remember(*secrets: str | None) -> None:
    """Redact these secrets in all later output, also the pieces between line breaks and other control characters.

    Secrets that may be words of a message are not redacted: of fewer than 4 characters, and of fewer than 8 without
    both letters and other characters.
    """
    for secret in secrets:
        pieces = _BREAK.split(secret or "")
        _secrets.update(filter(_is_distinctive, {(secret or "").strip(), *(pieces if len(pieces) > 1 else ())}))


def _is_distinctive(secret: str) -> bool:
    has_letters = any(map(str.isalpha, secret))
    return len(secret) >= _SHORTEST or (len(secret) >= _SHORTEST_WORD and has_letters and not secret.isalpha())


def remember_arguments(words: Sequence[str]) -> None:
    """Remember the secrets of a command line, as errors about other arguments may contain them.

    Secrets are the token and the key, and the passwords in URLs, settings of databases and JSON.
    """
    for word, following in zip(words, [*words[1:], ""], strict=True):
        flag, equals, value = word.partition("=")
        if flag in SECRET_FLAGS:
            remember(value if equals else following)
            continue
        if "://" in word and ":" in (user := word.partition("://")[2].rpartition("@")[0]):
            password = user.partition(":")[2]
            remember(password, unquote(password))
        for named in _NAMED.finditer(word):
            password = word[named.end("open" if named["open"] else 1) : named.end()]
            remember(password, unquote(password))


def remember_environment(variables: Mapping[str, str]) -> None:
    """Remember the values of environment variables with names that end in a word for a secret."""
    remember(*(value for name, value in variables.items() if _VARIABLE.fullmatch(name)))


def redact(text: str) -> str:
    """Return a text with tokens, passwords and everything that looks like them redacted."""
    for form, is_word in _list_forms(frozenset(_secrets)):
        if form in text:
            text = re.sub(rf"(?<!\w){re.escape(form)}(?!\w)", "…", text) if is_word else text.replace(form, "…")
    if ":" in text:
        if "@" in text:
            text = _BEHIND_HOST.sub(r"\1:…", _WORD.sub(_hide_password, text))
        if ":/" in text:
            text = _WITHOUT_HOST.sub(r"\1:…", text)
    if ("=" in text or ":" in text) and any(map(text.lower().__contains__, _NAME_MARKS)):
        text = _NAMED.sub(_hide_value, text)
    return _TOKEN.sub(r"\1…", text) if any(map(text.__contains__, _TOKEN_MARKS)) else text


def _hide_password(word: re.Match[str]) -> str:
    """Redact the password before the host: up to the last @, as a password may contain / and @."""
    head, _, host = word[0].rpartition("@")
    user = _USER.search(head)
    return f"{head[: user.end()]}…@{host}" if user and user.end() < len(head) else word[0]


def _hide_value(named: re.Match[str]) -> str:
    """Redact a value after its name; quotes stay, so that JSON stays JSON."""
    quote_of_key = named["key"] or ""
    return named[1] + (f"{named['open']}…" if named["open"] else f"{quote_of_key}…{quote_of_key}")


@functools.lru_cache(maxsize=4)
def _list_forms(secrets: frozenset[str]) -> tuple[tuple[str, bool], ...]:
    """List the spellings of secrets in messages, the longest first, and whether each is redacted only as a word."""
    forms = {form: False for secret in secrets if len(secret) >= _SHORTEST for form in _spell(secret)}
    forms |= {secret: True for secret in secrets if len(secret) < _SHORTEST}
    return tuple(sorted(forms.items(), key=lambda form: len(form[0]), reverse=True))


def _spell(secret: str) -> Iterator[str]:
    """Yield a secret unchanged, percent-encoded, escaped, and within base64 (`Authorization: Basic`)."""
    # Lone surrogates are bytes of a command line that are not UTF-8.
    raw = secret.encode("utf-8", "surrogateescape" if _UNSEEN.search(secret) else "strict")
    yield from (secret, repr(secret)[1:-1], repr(raw)[2:-1], html.escape(secret), visible(secret))
    for encoded in (quote(raw), quote(raw, safe=""), quote_plus(raw)):
        yield from (encoded, re.sub("%..", lambda code: code[0].lower(), encoded))
    yield from (json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1])
    for before, cut in enumerate((0, 2, 3)):  # Characters that also depend on the bytes before the secret.
        size = 8 * (before + len(raw)) // 6
        encoded = base64.b64encode(b"\0" * before + raw)[cut:size].decode()
        yield from (encoded, encoded.translate({ord("+"): "-", ord("/"): "_"}))


def shorten(text: str, longest: int) -> str:
    """Return a text without secrets on one line, cut after `longest` characters.

    A cut before the redaction could leave the beginning of a secret.
    """
    line = " ".join(redact(text).split())
    return line if len(line) <= longest else f"{line[:longest]}…"


def visible(text: str) -> str:
    """Return a text with control characters escaped as in Python."""
    return _UNSEEN.sub(lambda match: _escape_character(match[0]), text)


def _escape_character(character: str) -> str:
    return f"\\u{ord(character):04x}" if ord(character) > 0xFF else f"\\x{ord(character):02x}"


def escape_json(text: str) -> str:
    """Return JSON with control characters and lone surrogates escaped as in JSON."""
    return _UNSEEN.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


class RedactedStream:
    """A stream that removes secrets from all output, including that of libraries, warnings and tracebacks.

    Control characters are escaped: only ctxext's consoles write styles (`keep_styles`), and progress bars of libraries
    move the cursor up.

    Args:
        stream: The stream that receives the output.
    """

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def write(self, text: str) -> Any:
        """Write a text without its secrets and control characters."""
        text = redact(text)
        return self.stream.write(text if _OF_BARS.fullmatch(text) else "\r".join(map(visible, text.split("\r"))))

    def writelines(self, lines: Sequence[str]) -> None:
        """Write several texts."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class StyledStream(RedactedStream):
    """A redacted stream that also writes terminal styles, for text that is already escaped."""

    def write(self, text: str) -> Any:
        """Write a text without its secrets; the pieces between terminal styles are redacted separately."""
        return self.stream.write("".join(map(redact, _STYLE.split(text))))


def keep_styles(stream: Any) -> Any:
    """Return a stream that writes the styles of text that is already escaped."""
    return StyledStream(stream.stream) if type(stream) is RedactedStream else stream
