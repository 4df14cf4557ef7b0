"""Common parts of modules that write or check files: the record's name, digests, JSON text, progress."""

import errno
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from ctxext.errors import CtxextError

MANIFEST = "ctxext.json"
"""The record of a converted checkpoint: its recipe and the digests of its files."""

DEMO = "demo"
"""Name of the checkpoint in this package; a folder with this name takes precedence."""

Progress = Callable[[str, int, int], None]
"""Callback with the current activity, the amount done and the total."""


_CHUNK = 1 << 22


def report_stage(progress: Progress | None, stage: str) -> None:
    """Report the beginning of a stage without a known amount, as 0 of 1 (`console.has_no_amount`)."""
    if progress is not None:
        progress(stage, 0, 1)


def open_regular(path: Path) -> BinaryIO:
    """Open a file to read its bytes; raise for a pipe, a device or a socket, which could block.

    Raises:
        OSError: The file cannot be opened.
    """
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CtxextError(f'"{path}" is not a regular file.', hint="Replace it with a regular file.")
    return os.fdopen(descriptor, "rb")


def is_text(name: str) -> bool:
    """Return whether a file's name is valid text without lone surrogates."""
    return name == name.encode("utf-8", "ignore").decode()


def copy_whole(origin: Path, target: Path) -> None:
    """Copy a file; raise before writing if the disk does not have enough space.

    Raises:
        OSError: The disk is full, or a path cannot be read or written.
    """
    check_room(target.parent, origin.stat().st_size)
    shutil.copyfile(origin, target)


def check_room(folder: Path, size: int) -> None:
    """Raise if the disk of a folder has less free space than `size` bytes.

    Raises:
        OSError: The same error as for a full disk.
    """
    if shutil.disk_usage(folder).free < size:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def sha256_of(path: Path) -> str:
    """Compute a file's SHA-256, read in pieces."""
    digest = hashlib.sha256()
    with open_regular(path) as file:
        while piece := file.read(_CHUNK):
            digest.update(piece)
    return digest.hexdigest()


def as_json(content: Mapping[str, Any]) -> str:
    """Format JSON as transformers does; lone surrogates, which are possible in file names, become "?"."""
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode("utf-8", "replace").decode()


def same_value(old: Any, new: Any) -> bool:
    """Return whether two values of JSON files are equal; NaN equals NaN."""
    return bool(old == new or (old != old and new != new))


def stamp_of(path: Path) -> list[int]:
    """Return a file's size and modification time in nanoseconds, to detect an edit without reading the file."""
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]


def has_stamp(path: Path, stamp: Sequence[int]) -> bool:
    """Return whether a file still has its stamp; file systems may round the time to seconds or microseconds."""
    size, time = stamp_of(path)
    then = stamp[1]
    return size == stamp[0] and time in (then, then // 1000 * 1000, then // 1_000_000_000 * 1_000_000_000)
