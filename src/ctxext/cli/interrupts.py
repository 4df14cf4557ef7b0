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
def exit_on_interrupt(print_hint: Callable[[], None]) -> Iterator[None]:
    """Make Ctrl-C end the process within about a second, for work that may stop anywhere without loss.

    Python raises KeyboardInterrupt between two operations of the main thread. One operation on a large model may take
    long, and some libraries swallow exceptions raised in a callback. Therefore a thread waits for the signal too.

    Args:
        print_hint: Prints how to continue. It is called once, by the thread that handles the signal first.
    """
    import socket  # Most commands do not need it.

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    printed = threading.Lock()

    def print_once() -> None:
        if printed.acquire(blocking=False):
            print_hint()

    theirs, ours = socket.socketpair()
    ours.setblocking(False)
    is_over = threading.Event()

    def wait() -> None:
        for number in iter(lambda: theirs.recv(1), b""):
            if number[0] == signal.SIGINT and not is_over.wait(_PATIENCE):
                print_once()
                os._exit(INTERRUPTED)

    before = signal.set_wakeup_fd(ours.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=wait, daemon=True).start()
    try:
        yield
    except KeyboardInterrupt:
        print_once()
        raise
    finally:
        is_over.set()
        signal.set_wakeup_fd(before)
        ours.close()
