"""How weights come into a new folder: cloned, linked or copied. What OUT is edited to never reaches the source unasked.

A hard link shares its bytes with the source for ever, so it is made only when asked for, never to a file of the Hub's
cache or of this package, and it loses its write bit. docs/security.md gives the reasons.
"""

import contextlib
import errno
import os
import stat
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from ctxext.checkpoint.opening import is_cached
from ctxext.errors import CtxextError
from ctxext.files.content import Progress, check_room

CLONED, HARD, COPIED = "cloned", "hard-linked", "copied"

_FICLONE = 0x40049409
_PIECE = 1 << 26
_PACKAGE = Path(__file__).parents[1]
_CANNOT = frozenset(
    {errno.EXDEV, errno.EPERM, errno.EACCES, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS}
    | {errno.EINVAL, errno.ENOTTY, errno.EBADF, errno.EROFS, errno.ETXTBSY}
)
"""Why a file system refuses to clone or to link; the next way is tried then."""

Way = Callable[[Path, Path, Progress | None], str | None]
"""Brings a file to a place; gives how, or None where it cannot be done this way."""


def _clone(origin: Path, target: Path, _progress: Progress | None) -> str | None:
    """A copy that shares its blocks until one of the two is written: Btrfs, XFS, bcachefs, ZFS."""
    try:
        import fcntl
    except ImportError:
        return None
    with origin.open("rb") as reading, target.open("wb") as writing:
        try:
            fcntl.ioctl(writing.fileno(), _FICLONE, reading.fileno())
        except OSError as error:
            if error.errno in _CANNOT:
                return None
            raise
    return CLONED


def _hard(origin: Path, target: Path, _progress: Progress | None) -> str | None:
    """One file under two names, of the user's own only; it loses its write bit, under both."""
    status = origin.stat()
    if is_guarded(origin) or status.st_uid != os.geteuid():
        return None
    try:
        os.link(origin, target)
        target.chmod(stat.S_IMODE(status.st_mode) & ~0o222)
    except OSError as error:
        if error.errno in _CANNOT:
            target.unlink(missing_ok=True)
            return None
        raise
    return HARD


def _copy(origin: Path, target: Path, progress: Progress | None) -> str:
    """A copy made by the kernel where it can, with the origin's time."""
    status, done = origin.stat(), 0
    check_room(target.parent, status.st_size)
    with origin.open("rb") as reading, target.open("wb") as writing:
        while done < status.st_size:
            done += _piece(reading.fileno(), writing.fileno(), min(_PIECE, status.st_size - done), target)
            if progress is not None:
                progress(target.name, done, status.st_size)
    return COPIED


def copy_range(reading: int, writing: int, start: int, size: int, target: Path) -> None:
    """Copy a part of a file to the place where another one is being written, by the kernel where it can.

    Args:
        reading: The descriptor of the file to read; its position moves.
        writing: The descriptor of the file to write, at its position.
        start: Where the part begins.
        size: How many bytes it has.
        target: The file that is written, for errors.

    Raises:
        CtxextError: the file has become shorter.
    """
    os.lseek(reading, start, os.SEEK_SET)
    while size:
        size -= _piece(reading, writing, min(_PIECE, size), target)


def _piece(reading: int, writing: int, size: int, target: Path) -> int:
    """Copy a piece at the files' positions, through this process only as a last resort; gives how many bytes."""
    count = 0
    for kernel_copies in (_copy_file_range, _sendfile):
        try:
            count = kernel_copies(reading, writing, size)
        except OSError as error:
            if error.errno not in _CANNOT:
                raise
        if count:
            return count
    piece = os.read(reading, min(size, 1 << 22))
    while count < len(piece):
        count += os.write(writing, piece[count:])
    if not count:
        raise CtxextError(f'"{target.name}" became shorter while it was copied.', hint="Run the same command again.")
    return count


def _copy_file_range(reading: int, writing: int, size: int) -> int:
    return os.copy_file_range(reading, writing, size) if hasattr(os, "copy_file_range") else 0


def _sendfile(reading: int, writing: int, size: int) -> int:
    """Where the first cannot, as between disks under an older kernel; macOS and BSD send to sockets alone."""
    return os.sendfile(writing, reading, None, size) if sys.platform == "linux" else 0


LINKS: Mapping[str, tuple[Way, ...]] = {
    "auto": (_clone, _copy),
    "reflink": (_clone,),
    "hard": (_hard, _copy),
    "copy": (_copy,),
}
"""The words of `--link`, and what is tried for each, in order."""


def bring(origin: Path, target: Path, link: str, progress: Progress | None = None) -> str:
    """Bring a file into a new folder; gives how it was done.

    Args:
        origin: The file, resolved.
        target: Its new place, where nothing is.
        link: One of `LINKS`.
        progress: Called with the file's name, bytes done and bytes in all.

    Raises:
        CtxextError: the file system cannot do what was asked for.
    """
    for way in LINKS[link]:
        how = way(origin, target, progress)
        if how is not None:
            if how != HARD:
                status = origin.stat()
                os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))
            return how
        with contextlib.suppress(FileNotFoundError):
            target.unlink()
    raise CtxextError(
        f'"{origin.name}" cannot be cloned: the file system of "{target.parent.parent}" does not do it.',
        hint="Leave --link out to copy, or choose --link hard.",
    )


def is_guarded(path: Path) -> bool:
    """Whether a file is not the user's to share: it belongs to the Hub's cache or to this package."""
    return is_cached(path) or _PACKAGE in path.parents
