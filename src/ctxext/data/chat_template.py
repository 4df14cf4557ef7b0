"""Rendering a tokenizer's untrusted chat template, with limits of time, memory and size."""

import contextlib
import re
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from ctxext.errors import CtxextError

_SECONDS = 5.0
"""Seconds of processor time for one conversation; published templates take a thousandth of one."""

_BYTES = 1 << 28
"""Memory for one conversation, besides its text; published templates take a thousandth of it."""

_BYTES_PER_CHARACTER = 100
"""Memory for each character of a conversation: a few copies of four bytes per character."""

_MOST_ADDED, _MOST_REPEATED = 1_000_000, 10
"""Maximum of added characters, and of repetitions of the messages: the template's text is tokenized next."""

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")

_STATM = Path("/proc/self/statm")
"""The file in which Linux reports the mapped memory of a process, in pages."""


def render_chat(tokenizer: Any, messages: Sequence[Any], **more: Any) -> str:
    """Render a conversation as one text, with further variables of the template."""
    render = partial(tokenizer.apply_chat_template, messages, tokenize=False, **more)
    return _rendered(lambda: (str(render()), ()), messages, more)[0]


def render_answers(tokenizer: Any, messages: Sequence[Any], **more: Any) -> tuple[str, Sequence[tuple[int, int]]]:
    """Render a conversation as one text, with the answers that the template marks by `{% generation %}`.

    Returns:
        The text, and the begin and end of each answer in it; no answers if the template marks none.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    template = tokenizer.get_chat_template(None, more.get("tools"))
    if not _GENERATION.search(template):
        return render_chat(tokenizer, messages, **more), ()
    given = {**tokenizer.special_tokens_map, **more, "chat_template": template, "return_assistant_tokens_mask": True}

    def render() -> tuple[str, Sequence[tuple[int, int]]]:
        (text,), (answers,) = render_jinja_template(conversations=[list(messages)], **given)
        return text, answers

    return _rendered(render, messages, more)


def _rendered(
    render: Callable[[], tuple[str, Sequence[tuple[int, int]]]], messages: Sequence[Any], more: Mapping[str, Any]
) -> tuple[str, Sequence[tuple[int, int]]]:
    size = len(str(messages)) + len(str(more))
    try:
        with _limited(), _memory_limited(_BYTES + _BYTES_PER_CHARACTER * size):
            text, answers = render()
    except MemoryError as error:
        raise _refused(f"it takes more than {_BYTES >> 20} MB of memory") from error
    except Exception as error:  # A template is a program.
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise _refused(lines[0]) from error
    if len(text) > _MOST_ADDED + _MOST_REPEATED * size:
        raise _refused(f"it makes {len(text)} characters of {size}")
    return text, answers


def _refused(reason: str) -> CtxextError:
    return CtxextError(
        f"The tokenizer's chat template cannot be rendered: {reason}", hint="Evaluate with --no-chat-template."
    )


@contextlib.contextmanager
def _memory_limited(num_bytes: int) -> Iterator[None]:
    """Raise MemoryError once the context allocates more than some bytes, if the system has such a limit (Linux).

    The limit applies to the whole process, so other threads share it.
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
        yield  # The limit is lower already.
        return
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    """Raise TimeoutError in the context after `_SECONDS`, on the main thread of a system with such a timer."""
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
