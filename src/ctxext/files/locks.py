"""One writer for each output: a lock file beside it, which the system lets go of when its process ends, however."""

import contextlib
import os
import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

from ctxext.errors import CtxextError

_held: dict[Path, int] = {}


@contextlib.contextmanager
def locked(out: Path) -> Iterator[None]:
    """Keep other processes, and other threads of this one, from writing an output until the block ends.

    The lock is `.NAME.ctxext-lock` beside the output and is removed afterwards. Who holds it may take it again.

    Args:
        out: A folder or a file that is about to be made; the folder around it must exist.
    """
    out = out.resolve()
    if _held.get(out) == threading.get_ident():
        yield
        return
    path = out.parent / f".{short_name(out.name)}.ctxext-lock"
    descriptor = _taken(path)
    if descriptor is None:
        raise CtxextError(
            f'"{out}" is being written by another run{_holder(path)}.',
            hint="Wait until it has ended, or choose another place.",
        )
    with contextlib.suppress(OSError):  # A full disk: who holds it is for people, the lock holds without.
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()} on {host_name()}".encode())
    _held[out] = threading.get_ident()
    try:
        yield
    finally:
        del _held[out]
        # Removed while it is held: who opened it meanwhile finds that it is gone, and makes a new one.
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        os.close(descriptor)


def _holder(path: Path) -> str:
    """Who holds a lock, as its file says; nothing where it says nothing of the kind."""
    try:
        content = path.read_bytes()[:99].decode("ascii", "replace")
    except OSError:
        return ""
    return f" ({content})" if re.fullmatch(r"process [0-9]+ on \w+", content) else ""


def host_name() -> str:
    """This machine's name, fit for a file's name."""
    return re.sub(r"[^A-Za-z0-9]", "_", socket.gethostname())[:40] or "host"


def _taken(path: Path) -> int | None:
    """An open descriptor that holds the lock; None where somebody else does."""
    try:
        import fcntl
    except ImportError:  # No such locks on Windows: a file that is there stands for one.
        with contextlib.suppress(FileExistsError):
            return os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR)
        return None
    while True:
        try:
            descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        except OSError as error:
            raise CtxextError(
                f'"{path.parent}" cannot be written to: {error.strerror}.', hint="Choose another place."
            ) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_ino == os.fstat(descriptor).st_ino:
                return descriptor
        os.close(descriptor)


def short_name(name: str) -> str:
    """A name that leaves room for more in a file name; a long one is cut and told apart by its digest."""
    import hashlib

    raw = os.fsencode(name)
    return name if len(raw) <= 120 else f"{name[:24]}-{hashlib.sha256(raw).hexdigest()[:16]}"
