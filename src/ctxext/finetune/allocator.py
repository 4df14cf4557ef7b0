"""How the C library's allocator keeps memory that is free again."""

import contextlib
import ctypes
import os
import sys

_MMAP_THRESHOLD, _BLOCK = -3, 1 << 20


def give_blocks_back() -> None:
    """Have glibc give each block of 1 MiB or more back to the kernel, unless the environment tells it something else.

    As it comes, it keeps blocks below the largest that it has seen freed, up to 32 MiB: what it keeps of tiles, in
    pieces, is more than they save, and at a short length it keeps what it gives back at a long one.
    """
    if sys.platform == "linux" and not any(name.startswith("MALLOC_") for name in os.environ):
        with contextlib.suppress(AttributeError):  # Another C library.
            ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, _BLOCK)
