"""How weights come into a new folder: cloned, linked or copied. What OUT is edited to never reaches the source unasked.

A hard link shares its bytes with the source for ever, so it is made only when asked for, never to a file of the Hub's
cache or of this package, and it loses its write bit. docs/security.md gives the reasons.
"""

import contextlib
import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path

from ctxext.checkpoint.opening import is_cached
from ctxext.errors import CtxextError
from ctxext.files.content import Progress, check_room
from ctxext.files.tensor_files import CANNOT, copy_range

CLONED, HARD, COPIED, REWRITTEN = "cloned", "hard-linked", "copied", "rewritten"

_FICLONE = 0x40049409
_PACKAGE = Path(__file__).parents[1]
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
            if error.errno in CANNOT:
                return None
            raise
    return CLONED


def _hard(origin: Path, target: Path, _progress: Progress | None) -> str | None:
    """One file under two names, of the user's own only; it loses its write bit, under both."""
    status = origin.stat()
    # What belongs to the Hub's cache or to this package is not the user's to share.
    if is_cached(origin) or _PACKAGE in origin.parents or status.st_uid != os.geteuid():
        return None
    try:
        os.link(origin, target)
        target.chmod(stat.S_IMODE(status.st_mode) & ~0o222)
    except OSError as error:
        if error.errno in CANNOT:
            target.unlink(missing_ok=True)
            return None
        raise
    return HARD


def _copy(origin: Path, target: Path, progress: Progress | None) -> str:
    """A copy made by the kernel where it can, with the origin's time."""
    size, done = origin.stat().st_size, 0
    check_room(target.parent, size)
    with origin.open("rb") as reading, target.open("wb", buffering=0) as writing:
        for count in copy_range(reading, writing, 0, size):
            done += count
            if progress is not None:
                progress(target.name, done, size)
    return COPIED


LINKS: Mapping[str, tuple[Way, ...]] = {
    "auto": (_clone, _copy),
    "reflink": (_clone,),
    "hard": (_hard, _copy),
    "copy": (_copy,),
}
"""The words of `--link`, and what is tried for each, in order."""


def bring(origin: Path, target: Path, link: str, progress: Progress | None = None) -> str:
    """Bring a resolved file to a new place by one of `LINKS`; gives how it was done."""
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
