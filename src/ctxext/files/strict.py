"""Strict JSON and YAML: no deep nesting, duplicate keys, alias bombs or lone surrogates."""

import functools
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ctxext.errors import CtxextError
from ctxext.files.content import open_regular

if TYPE_CHECKING:
    import yaml

_MAX_BYTES = 200_000_000
_MAX_YAML_BYTES = 4_000_000
_MAX_DEPTH = 64
_MAX_DIGITS = 400
_MAX_ALIASES = 16
_OF_VALUES = (ValueError, TypeError, ArithmeticError, LookupError, AttributeError, RecursionError)
"""PyYAML's errors for a value that does not match its tag, or for deeply nested merges of aliases."""
_SURROGATE = re.compile(r"[\ud800-\udfff]")
_SPACES = re.compile(r"[\x00-\x20\x7f-\x9f\u2028-\u202e\u2066-\u2069]+")


def read_text(path: Path, limit: int = _MAX_BYTES) -> str:
    """Read a UTF-8 text file of at most `limit` bytes."""
    try:
        with open_regular(path) as file:
            if os.fstat(file.fileno()).st_size > limit:
                raise CtxextError(f'"{path}" is larger than the limit of {limit // 1_000_000} MB.')
            content = file.read(limit)
    except OSError as error:
        hint = "Check its path." if isinstance(error, FileNotFoundError) else "Check its permissions."
        raise CtxextError(f'"{path}" cannot be read: {error.strerror}.', hint=hint) from error
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CtxextError(f'"{path}" is not valid UTF-8: invalid byte at position {error.start}.') from error


def parse_json(text: str, name: str, *, constants: bool = True) -> Any:
    """Parse a JSON text.

    Args:
        text: The text.
        name: Its name in errors.
        constants: Whether NaN and Infinity are accepted, although they are not valid JSON.
    """
    return _parse(text, f'"{name}"', constants=constants)


def parse_entry(text: str, place: str) -> Any:
    """Parse a JSON text in a file; errors begin with its place."""
    return _parse(text, place, shows_line=False)


def _parse(text: str, place: str, *, constants: bool = True, shows_line: bool = True) -> Any:
    def reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        content = dict(pairs)
        if len(content) < len(pairs):
            duplicate = _first_duplicate([key for key, _ in pairs])
            raise CtxextError(f'{place} has the key "{duplicate}" twice.', hint="Remove one of them.")
        return content

    def parse_digits(digits: str) -> int:
        if len(digits) > _MAX_DIGITS:
            raise CtxextError(f"{place} contains a number with {len(digits)} digits.")
        return int(digits)

    def parse_constant(word: str) -> float:
        if not constants:
            raise CtxextError(f"{place} is not valid JSON: {word} is not a JSON number.")
        return float(word)

    try:
        content = json.loads(
            text.removeprefix("\ufeff"),
            object_pairs_hook=reject_duplicates,
            parse_int=parse_digits,
            parse_constant=parse_constant,
        )
    except json.JSONDecodeError as error:
        line = f" in line {error.lineno}" if shows_line else ""
        raise CtxextError(f"{place} is not valid JSON: {error.msg}{line}.") from error
    except RecursionError as error:
        raise _too_deep(place) from error
    if "\\u" in text or text.count("[") + text.count("{") > _MAX_DEPTH:
        check_characters(content, place)
    return content


def parse_yaml(text: str, name: str) -> Any:
    """Parse a YAML text with few aliases, which excludes alias bombs.

    Args:
        text: The text.
        name: Its name in errors.
    """
    import yaml

    if len(text) > _MAX_YAML_BYTES:
        raise CtxextError(f'"{name}" is larger than the limit of {_MAX_YAML_BYTES // 1_000_000} MB.')
    try:
        _check_events(yaml.parse(text, Loader=yaml.SafeLoader), name)
        content = yaml.load(text, Loader=_strict_loader())
    except _DuplicateKeyError as error:
        raise CtxextError(f'"{name}" has the key "{error.args[0]}" twice.', hint="Remove one of them.") from error
    except (yaml.YAMLError, *_OF_VALUES) as error:
        raise CtxextError(f'"{name}" is not valid YAML: {" ".join(str(error).split())}') from error
    check_characters(content, f'"{name}"')
    return content


def _first_duplicate(keys: Iterable[str]) -> str:
    """Return the first repeated key, in one pass because an untrusted list may be long."""
    seen: set[str] = set()
    return next(key for key in keys if key in seen or seen.add(key))  # type: ignore[func-returns-value]


class _DuplicateKeyError(Exception):
    """Duplicate key in a mapping."""


@functools.cache
def _strict_loader() -> "type[yaml.SafeLoader]":
    """Build a loader of plain data without duplicate keys, on first use: most commands do not read YAML."""
    import yaml

    class Strict(yaml.SafeLoader):
        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
            if len(set(keys)) < len(keys):
                raise _DuplicateKeyError(_first_duplicate(keys))
            return super().construct_mapping(node, deep=deep)

    return Strict


def _check_events(events: Iterable[Any], name: str) -> None:
    """Raise if a text has many aliases or is nested too deeply, before anything is built."""
    import yaml

    depth = num_aliases = 0
    for event in events:
        num_aliases += isinstance(event, yaml.AliasEvent)
        if num_aliases > _MAX_ALIASES:
            raise CtxextError(f'"{name}" has more than {_MAX_ALIASES} YAML aliases.', hint="Expand them.")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _MAX_DEPTH:
            raise _too_deep(f'"{name}"')


def check_characters(content: Any, place: str) -> None:
    """Raise if parsed content contains lone surrogates or is nested too deeply.

    Args:
        content: Dicts, lists and strings.
        place: Its name in errors.
    """
    level, depth = [content], 0
    while level:
        following: list[Any] = []
        for item in level:
            if depth == _MAX_DEPTH and isinstance(item, dict | list):
                raise _too_deep(place)
            if isinstance(item, dict):
                following += [*item.keys(), *item.values()]
            elif isinstance(item, list):
                following += item
            elif isinstance(item, str) and _SURROGATE.search(item):
                raise CtxextError(f"{place} contains a lone surrogate, which is not valid UTF-8.")
        level, depth = following, depth + 1


def in_markdown(text: str) -> str:
    """Escape an untrusted text for Markdown: one line, without tags, pictures or table borders."""
    return _SPACES.sub(" ", text).replace("<", "&lt;").replace("![", "!&#91;").replace("|", "&#124;")


def _too_deep(place: str) -> CtxextError:
    return CtxextError(f"{place} is nested more than {_MAX_DEPTH} levels deep.")
