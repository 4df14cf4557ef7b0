"""Comparison of settings: a stopped run can only be resumed with the same ones."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from ctxext.errors import CtxextError
from ctxext.redaction import shorten

_LONGEST = 80
"""Maximum number of characters of a printed value."""


def check_same_settings(place: object, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Raise if the settings of a stopped run, as read from its file, differ from those of the run that continues it.

    Args:
        place: The folder or file of the stopped run, for the message.
        old: Its settings by name; a setting may be a mapping.
        new: The settings of the run that continues it.

    Raises:
        CtxextError: Settings differ; the message has all of them, with both values.
    """
    if differences := list(_describe_differences(old, json.loads(json.dumps(new)))):
        raise CtxextError(
            f'"{place}" cannot be resumed with other settings: {"; ".join(differences)}.',
            hint="Use the same options as before, or start over with --overwrite.",
        )


def _describe_differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    for key in {**old, **new}:
        before, now = old.get(key), new.get(key)
        if isinstance(before, Mapping) and isinstance(now, Mapping):
            yield from (f"{key} {difference}" for difference in _describe_differences(before, now))
        elif before != now:
            before, now = (shorten(_format_value(value), _LONGEST) for value in (before, now))
            yield f"{key} {before}, now {now}"


def _format_value(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ",".join(map(_format_value, value)) or "none"
    if isinstance(value, Mapping):
        return " ".join(map(_format_value, value.values())) or "none"
    return "none" if value is None else str(value)
