"""The most memory that was in use for a while."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_PEAK = "5"
"""What Linux takes for "forget the peak" (proc(5))."""


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
