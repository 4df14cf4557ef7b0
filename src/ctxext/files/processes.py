"""Processes: those that `accelerate launch` starts, how much memory is in use, and how SIGTERM ends one."""

import contextlib
import datetime
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_PEAK = "5"
"""What Linux takes for "forget the peak" (proc(5))."""


def rank() -> int:
    """This process's number."""
    return int(os.environ.get("RANK", "0"))


def num_processes() -> int:
    """How many processes share the work."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def wait_for_everyone(device: str) -> None:
    """Return once every process has come here; a process may be hours behind."""
    if num_processes() > 1:
        from accelerate import PartialState

        PartialState(cpu=device == "cpu", timeout=datetime.timedelta(days=30)).wait_for_everyone()


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Inside this context the process shares its work with no other, whatever started it."""
    before = {name: os.environ.pop(name) for name in ("RANK", "WORLD_SIZE") if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(before)


def forget_peak(device: "torch.device") -> bool:
    """Start to watch the memory of a device, or of this process for the CPU; false where that is not possible."""
    import torch

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return True
    try:
        _CLEAR.write_text(_PEAK, encoding="ascii")
    except OSError:
        return False
    return device.type == "cpu"


def peak_memory(device: "torch.device") -> int:
    """The most memory in use since `forget_peak`, in bytes; where that was not possible, since the process began."""
    import torch

    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    if not _STATUS.exists():
        import resource

        unit = 1 if sys.platform == "darwin" else 1024  # getrusage(2): macOS counts bytes.
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    lines = _STATUS.read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024


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
