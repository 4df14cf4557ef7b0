"""What every part that writes or checks files has in common: the record's name, digests, JSON text, progress."""

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
"""The file in which a converted checkpoint says what was done and what each file was."""

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it and how much in all."""

_CHUNK = 1 << 22


def open_regular(path: Path) -> BinaryIO:
    """Open a file to read its bytes; a pipe, a device or a socket is refused and not waited for.

    Raises:
        OSError: it cannot be opened.
    """
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CtxextError(f'"{path}" is not a regular file.', hint="Put a copy of its content in its place.")
    return os.fdopen(descriptor, "rb")


def is_text(name: str) -> bool:
    """Whether a file's name can be written down; one that is not text holds halves of characters."""
    return name == name.encode("utf-8", "ignore").decode()


def copy_whole(origin: Path, target: Path) -> None:
    """Copy a file; a disk that has not the room for it says so before anything is written.

    Raises:
        OSError: the disk is full, or a place cannot be read or written.
    """
    check_room(target.parent, origin.stat().st_size)
    shutil.copyfile(origin, target)


def check_room(folder: Path, size: int) -> None:
    """Raise at once what writing so many bytes would raise in the end.

    Raises:
        OSError: the disk has not so many left.
    """
    if shutil.disk_usage(folder).free < size:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def sha256_of(path: Path) -> str:
    """A file's SHA-256, read in pieces."""
    digest = hashlib.sha256()
    with open_regular(path) as file:
        while piece := file.read(_CHUNK):
            digest.update(piece)
    return digest.hexdigest()


def as_json(content: Mapping[str, Any]) -> str:
    """A JSON file's text, as transformers writes it; halves of characters, as names of files may hold, become "?"."""
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode("utf-8", "replace").decode()


def same_value(value: Any, other: Any) -> bool:
    """Whether two values of JSON files are the same; NaN is NaN, as which number it is does not matter here."""
    return bool(value == other or (value != value and other != other))


def keys_that_differ(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return the keys whose values differ between a record and new content, compared as JSON."""
    new = json.loads(json.dumps(new))
    return [key for key in {**old, **new} if old.get(key) != new.get(key)]


def stamp_of(path: Path) -> list[int]:
    """A file's size and the time of its last change in nanoseconds, by which an edit shows without reading it."""
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]


def has_stamp(path: Path, stamp: Sequence[int]) -> bool:
    """Whether a file still has its stamp; a file system that keeps whole seconds or microseconds may round the time."""
    size, time = stamp_of(path)
    then = stamp[1]
    return size == stamp[0] and time in (then, then // 1000 * 1000, then // 1_000_000_000 * 1_000_000_000)
