"""What glibc's allocator does with freed memory that is soon wanted again."""

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator
from typing import Any

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
"""Names of settings in malloc.h."""
_KEEPING = {_MMAP_MAX: 0, _TRIM_THRESHOLD: -1}
"""No block of its own for what is large, and never a smaller heap (mallopt(3))."""
_USUAL = {_MMAP_MAX: 65536, _MMAP_THRESHOLD: 32 << 20, _TRIM_THRESHOLD: 64 << 20}
"""What glibc comes to by itself in a process that frees large blocks."""


@contextlib.contextmanager
def freed_memory_kept() -> Iterator[bool]:
    """Let the process keep what it frees, on Linux with glibc; nothing elsewhere, nor where MALLOC_… says something.

    By default glibc gives the kernel blocks above 32 MiB back as soon as they are freed, and the kernel fills their
    pages with zeros when they are wanted again, at each layer of each step.

    Yields:
        Whether it is so.
    """
    libc = _glibc()
    if libc is None:
        yield False
        return
    is_kept = all(libc.mallopt(*setting) for setting in _KEEPING.items())
    try:
        yield is_kept
    finally:
        for setting in _USUAL.items():
            libc.mallopt(*setting)
        libc.malloc_trim(0)


def _glibc() -> Any:
    """The C library, if it is glibc and nobody has set up its allocator."""
    is_chosen = any(name.startswith("MALLOC_") for name in os.environ) or "malloc" in os.environ.get(
        "GLIBC_TUNABLES", ""
    )
    if is_chosen or not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "gnu_get_libc_version") and hasattr(libc, "mallopt") else None
