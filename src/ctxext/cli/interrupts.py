"""End the process promptly after Ctrl-C, even during a long operation."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator

INTERRUPTED = 130
"""The exit code after Ctrl-C."""

_PATIENCE = 1.0
"""Seconds to wait for a normal exit of the process."""


@contextlib.contextmanager
def exit_on_interrupt(tell: Callable[[], None]) -> Iterator[None]:
    """Make Ctrl-C end the process within about a second, for work that may stop anywhere without loss.

    Python raises KeyboardInterrupt between two operations of the main thread. One operation on a large model may take
    long, and some libraries swallow exceptions raised in a callback. So a thread waits for the signal too.

    Args:
        tell: Prints how to continue; called once, by the thread that handles the signal first.
    """
    import socket  # Most commands need none.

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    announced = threading.Lock()

    def tell_once() -> None:
        if announced.acquire(blocking=False):
            tell()

    theirs, ours = socket.socketpair()
    ours.setblocking(False)
    is_over = threading.Event()

    def wait() -> None:
        for number in iter(lambda: theirs.recv(1), b""):
            if number[0] == signal.SIGINT and not is_over.wait(_PATIENCE):
                tell_once()
                os._exit(INTERRUPTED)

    before = signal.set_wakeup_fd(ours.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=wait, daemon=True).start()
    try:
        yield
    except KeyboardInterrupt:
        tell_once()
        raise
    finally:
        is_over.set()
        signal.set_wakeup_fd(before)
        ours.close()
