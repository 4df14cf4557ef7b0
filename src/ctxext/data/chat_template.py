"""A tokenizer's chat template, which a stranger wrote: what it makes of messages, or one line that says why not."""

import contextlib
import signal
import threading
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

from ctxext.errors import CtxextError

_SECONDS = 5.0
"""Of the processor's time for one conversation; a template of a published model takes a thousandth of one."""


def rendered(tokenizer: Any, messages: Sequence[Any], **more: Any) -> str:
    """A conversation as one text.

    Args:
        tokenizer: A transformers tokenizer with a chat template.
        messages: What was said.
        more: What else the template is given.

    Raises:
        CtxextError: the template fails, whatever it raises, or does not end.
    """
    try:
        with _limited():
            return str(tokenizer.apply_chat_template(messages, tokenize=False, **more))
    except Exception as error:  # A template is a program.
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise CtxextError(
            f"The tokenizer's chat template cannot be rendered: {lines[0]}", hint="Evaluate with --no-chat-template."
        ) from error


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
