"""SIGTERM, by which schedulers preempt a run (SLURM, Kubernetes), as an exception."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

TERMINATED = 128 + signal.SIGTERM
"""The exit code after SIGTERM, as shells report it."""


class Terminated(SystemExit):
    """The process was asked to end by SIGTERM."""

    def __init__(self) -> None:
        super().__init__(TERMINATED)


def raise_terminated(number: int, frame: FrameType | None) -> None:
    """Handle a signal by `Terminated`."""
    raise Terminated


@contextlib.contextmanager
def raised_when_terminated() -> Iterator[None]:
    """Inside this context SIGTERM raises `Terminated`, unless the program has a handler of another kind."""
    is_default = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if not is_default or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGTERM, raise_terminated)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
