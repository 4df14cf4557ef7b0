"""Processes that share work, memory use, and SIGTERM."""

import contextlib
import ctypes
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_BOOT, _PROCESS_IDS = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
"""Linux's id of each start, and of the namespace of process ids (pid_namespaces(7))."""
_POLL = 0.1
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_LARGE_PAGES = "THP_MEM_ALLOC_ENABLE"
_MMAP_THRESHOLD, _BLOCK = -3, 1 << 20
"""The parameter of mallopt(3), and its value in bytes."""
_PEAK = "5"
"""Value that resets the peak on Linux (proc(5))."""


def rank() -> int:
    """Return the number of the current process among those of `--num-processes`, `accelerate launch` or torchrun."""
    return int(os.environ.get("RANK", "0"))


def num_processes() -> int:
    """Return the number of processes that share the work."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def wait_for(path: Path) -> None:
    """Wait until another process has written a file or folder, under its final name."""
    while not path.exists():
        time.sleep(_POLL)


@contextlib.contextmanager
def run_alone() -> Iterator[None]:
    """Run as a single process for the duration of the context, even under a launcher."""
    before = {name: os.environ.pop(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE") if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(before)


def _memory_of(device: "torch.device") -> Any:
    """Return torch's module of an accelerator that counts its memory; None for a CPU and MPS."""
    import torch

    module = None if device.type == "cpu" else torch.get_device_module(device)
    return module if hasattr(module, "max_memory_allocated") else None


def forget_peak(device: "torch.device") -> bool:
    """Reset the peak memory of a device, or of this process for the CPU; return whether this is possible."""
    if (module := _memory_of(device)) is not None:
        module.reset_peak_memory_stats(device)
        return True
    try:
        _CLEAR.write_text(_PEAK, encoding="ascii")
    except OSError:
        return False
    return device.type == "cpu"


def peak_memory(device: "torch.device") -> int:
    """Return the peak memory in bytes since `forget_peak`, or since the process began."""
    if (module := _memory_of(device)) is not None:
        return int(module.max_memory_allocated(device))
    if not _STATUS.exists():
        import resource

        unit = 1 if sys.platform == "darwin" else 1024  # getrusage(2): macOS counts bytes.
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    lines = _STATUS.read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024


def return_blocks() -> None:
    """Make glibc return freed blocks of 1 MiB or more to the kernel at once, unless MALLOC_ variables are set.

    By default it keeps freed blocks below the largest freed one, up to 32 MiB: a training then needs half as much
    memory again. Before torch is loaded, this also makes torch request large pages, so that new blocks cost less time.
    """
    if sys.platform == "linux" and not any(name.startswith("MALLOC_") for name in os.environ):
        if _LARGE_PAGES not in os.environ:
            os.putenv(_LARGE_PAGES, "1")  # For torch's library alone, which reads it once.
        with contextlib.suppress(AttributeError):  # Other C libraries have no mallopt.
            ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, _BLOCK)


def trim_heap() -> None:
    """Make glibc return all freed blocks to the kernel, small ones too."""
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError):  # Other C libraries have no malloc_trim.
            ctypes.CDLL(None).malloc_trim(0)


def total_memory(device: "torch.device") -> int:
    """Return the memory of an accelerator, or this process's share of the machine's, in bytes."""
    if (module := _memory_of(device)) is not None:
        return int(module.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def machine_id() -> str:
    """Return a name of the machine and, in a container, of its process ids: other containers have the same numbers.

    A restart of the machine changes it too, as it ends all processes.
    """
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(_BOOT.read_text(encoding="ascii").strip())
    with contextlib.suppress(OSError):
        parts.append(str(_PROCESS_IDS.readlink()))
    return " ".join(parts)


TERMINATED = 128 + signal.SIGTERM
"""The exit code after SIGTERM, as shells report it."""


class Terminated(SystemExit):
    """Exit after SIGTERM."""

    def __init__(self) -> None:
        super().__init__(TERMINATED)


def raise_terminated(number: int, frame: FrameType | None) -> None:
    """Raise `Terminated` as a signal handler."""
    raise Terminated


@contextlib.contextmanager
def raise_on_sigterm() -> Iterator[None]:
    """Make SIGTERM raise `Terminated` for the duration of the context, unless the program has its own handler."""
    is_default = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if not is_default or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGTERM, raise_terminated)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
