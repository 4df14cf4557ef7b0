"""A tokenizer's chat template, which a stranger wrote: what it makes of messages, or one line that says why not."""

import contextlib
import signal
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from ctxext.errors import CtxextError

_SECONDS = 5.0
"""Of the processor's time for one conversation; a template of a published model takes a thousandth of one."""

_BYTES = 1 << 28
"""Of memory for one conversation, beside what its own text takes; a published template takes a thousandth of it."""

_BYTES_PER_CHARACTER = 100
"""Of memory for each character of a conversation: a few copies of it, four bytes a character."""

_MOST_ADDED, _MOST_REPEATED = 1_000_000, 10
"""Characters that a template may add, and how often it may repeat what was said: its text is tokenized next."""

_STATM = Path("/proc/self/statm")
"""Where Linux says how much a process has mapped, in pages."""


def rendered(tokenizer: Any, messages: Sequence[Any], **more: Any) -> str:
    """A conversation as one text.

    Args:
        tokenizer: A transformers tokenizer with a chat template.
        messages: What was said.
        more: What else the template is given.

    Raises:
        CtxextError: the template fails, whatever it raises, does not end, or takes or writes far too much.
    """
    size = len(str(messages)) + len(str(more))
    try:
        with _limited(), _memory_limited(_BYTES + _BYTES_PER_CHARACTER * size):
            text = str(tokenizer.apply_chat_template(messages, tokenize=False, **more))
    except MemoryError as error:
        raise _refused(f"it takes more than {_BYTES >> 20} MB of memory") from error
    except Exception as error:  # A template is a program.
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise _refused(lines[0]) from error
    if len(text) > _MOST_ADDED + _MOST_REPEATED * size:
        raise _refused(f"it makes {len(text)} characters of {size}")
    return text


def _refused(reason: str) -> CtxextError:
    return CtxextError(
        f"The tokenizer's chat template cannot be rendered: {reason}", hint="Evaluate with --no-chat-template."
    )


@contextlib.contextmanager
def _memory_limited(num_bytes: int) -> Iterator[None]:
    """Raise MemoryError in here once so much more is asked for, where the system has such a limit (Linux).

    The limit is that of the whole process, so that other threads have the same room for as long as it lasts.
    """
    try:
        import resource

        pages = int(_STATM.read_text(encoding="ascii").split()[0])
        before = resource.getrlimit(resource.RLIMIT_AS)
    except (ImportError, OSError, ValueError):
        yield
        return
    soft, hard = before
    most = pages * resource.getpagesize() + num_bytes
    if soft != resource.RLIM_INFINITY and soft <= most:
        yield  # Somebody has set a lower one.
        return
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    """Raise TimeoutError in here once the time is up, where the system has such an alarm and this thread hears it."""
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(_number: int, _frame: FrameType | None) -> None:
        raise TimeoutError(f"it was not done after {_SECONDS:g} seconds")

    before = signal.signal(signal.SIGVTALRM, ring)
    signal.setitimer(signal.ITIMER_VIRTUAL, _SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
