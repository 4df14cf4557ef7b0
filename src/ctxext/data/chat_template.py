"""Rendering of untrusted chat templates, with limits on time, memory and size."""

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
"""Maximum CPU seconds for one conversation; published templates take a thousandth of a second."""

_BYTES = 1 << 28
"""Maximum memory for one conversation, besides its text; published templates take a thousandth of it."""

_BYTES_PER_CHARACTER = 100
"""Maximum memory for each character of a conversation: a few copies of four bytes."""

_MOST_ADDED, _MOST_REPEATED = 1_000_000, 10
"""Maximum number of added characters, and of repetitions of the messages: the result is tokenized next."""

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")

_STATM = Path("/proc/self/statm")
"""The file in which Linux reports the mapped memory of a process, in pages."""


def render_chat(tokenizer: Any, messages: Sequence[Any], **more: Any) -> str:
    """Render a conversation as one text, with further variables of the template."""
    render = partial(tokenizer.apply_chat_template, messages, tokenize=False, **more)
    return _render_limited(lambda: (str(render()), ()), messages, more)[0]


def render_answers(tokenizer: Any, messages: Sequence[Any], **more: Any) -> tuple[str, Sequence[tuple[int, int]]]:
    """Render a conversation as one text, with the answers that the template marks by `{% generation %}`.

    Returns:
        The text, and the start and end of each answer in it; no answers if the template marks none.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    template = tokenizer.get_chat_template(None, more.get("tools"))
    if not _GENERATION.search(template):
        return render_chat(tokenizer, messages, **more), ()
    values = {**tokenizer.special_tokens_map, **more, "chat_template": template, "return_assistant_tokens_mask": True}

    def render() -> tuple[str, Sequence[tuple[int, int]]]:
        (text,), (answers,) = render_jinja_template(conversations=[list(messages)], **values)
        return text, answers

    return _render_limited(render, messages, more)


def read_template(tokenizer: Any) -> str:
    """Return the source of a tokenizer's chat template; empty if it has none."""
    read = getattr(tokenizer, "get_chat_template", None)
    template = read() if read is not None else getattr(tokenizer, "chat_template", None)
    return str(template or "")


def _render_limited(
    render: Callable[[], tuple[str, Sequence[tuple[int, int]]]], messages: Sequence[Any], more: Mapping[str, Any]
) -> tuple[str, Sequence[tuple[int, int]]]:
    size = len(str(messages)) + len(str(more))
    try:
        with _limit_time(), _limit_memory(_BYTES + _BYTES_PER_CHARACTER * size):
            text, answers = render()
    except MemoryError as error:
        raise _template_error(f"it needs more than {_BYTES >> 20} MB of memory") from error
    except Exception as error:  # A template is a program.
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise _template_error(lines[0]) from error
    if len(text) > _MOST_ADDED + _MOST_REPEATED * size:
        raise _template_error(f"it turns {size} characters into {len(text)}")
    return text, answers


def _template_error(reason: str) -> CtxextError:
    return CtxextError(
        f"The tokenizer's chat template cannot be rendered: {reason}", hint="Evaluate with --no-chat-template."
    )


@contextlib.contextmanager
def _limit_memory(num_bytes: int) -> Iterator[None]:
    """Raise MemoryError if the context allocates more than `num_bytes`; Linux only.

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
        yield  # The limit is already lower.
        return
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@contextlib.contextmanager
def _limit_time() -> Iterator[None]:
    """Raise TimeoutError in the context after `_SECONDS`; only on the main thread, and not on Windows."""
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(_number: int, _frame: FrameType | None) -> None:
        raise TimeoutError(f"it ran for more than {_SECONDS:g} seconds")

    before = signal.signal(signal.SIGVTALRM, ring)
    signal.setitimer(signal.ITIMER_VIRTUAL, _SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
