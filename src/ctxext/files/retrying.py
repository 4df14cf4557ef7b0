"""Repetition of requests that a busy server refuses."""

import contextlib
import math
import time
from collections.abc import Callable
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import TypeVar

from ctxext.errors import CtxextError

_LEAST, _MOST = 0.1, 30.0
"""Limits of a pause in seconds."""

_Result = TypeVar("_Result")


def call_with_retries(
    action: Callable[[], _Result], max_retries: int, find_pause: Callable[[CtxextError, int], float | None]
) -> _Result:
    """Call a function, and again after a pause if it raises an error that may pass.

    Args:
        action: The function.
        max_retries: Maximum number of repetitions.
        find_pause: Returns the seconds until the next attempt after an error and a number of earlier repetitions; None
            if the same attempt would fail again.
    """
    for attempt in range(max_retries):
        try:
            return action()
        except CtxextError as error:
            if (seconds := find_pause(error, attempt)) is None:
                raise
        time.sleep(seconds)
    return action()


def count_pause(retry_after: str | None, attempt: int) -> float:
    """Return the seconds to wait before a repetition: from the Retry-After header, else doubled with each attempt.

    The header is a number of seconds or an HTTP date (RFC 9110, section 10.2.3), in any of the three forms of dates.
    """
    seconds, text = math.nan, retry_after or ""
    try:
        seconds = float(text)
    except ValueError:
        with contextlib.suppress(ValueError, OverflowError, TypeError):
            date = parsedate_to_datetime(text)
            seconds = (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp() - time.time()
    if not math.isfinite(seconds):
        seconds = 2.0 ** min(attempt, 10)
    return min(max(seconds, _LEAST), _MOST)
