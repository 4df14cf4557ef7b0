"""A folder made beside its place and renamed when it is whole, so that no half-made one is ever seen."""

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from ctxext.errors import CtxextError


def check_out(out: Path, source: Path, *, overwrite: bool) -> None:
    """Refuse a place that cannot or must not be written.

    Raises:
        CtxextError: OUT is a file, not empty, inside SOURCE or around it, or cannot be created.
    """
    place, origin = out.resolve(), source.resolve()
    if place == origin or origin in place.parents:
        raise CtxextError(f'OUT "{out}" lies inside SOURCE "{source}".', hint="Choose a folder beside it.")
    if place in origin.parents:
        raise CtxextError(f'OUT "{out}" contains SOURCE "{source}".', hint="Choose another folder.")
    if out.exists() and not out.is_dir():
        raise CtxextError(f'OUT "{out}" is a file.', hint="Choose another name.")
    try:
        has_files = out.is_dir() and any(out.iterdir())
    except PermissionError as error:
        raise CtxextError(f'OUT "{out}" cannot be read.', hint="Check its permissions.") from error
    if has_files and not overwrite:
        raise CtxextError(f'OUT "{out}" is not empty.', hint="Choose another folder, or replace it with --overwrite.")
    nearest = next(folder for folder in place.parents if folder.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        raise CtxextError(f'"{nearest}" cannot be written to.', hint="Choose another place for OUT.")


@contextlib.contextmanager
def full_disk_told(out: Path) -> Iterator[None]:
    """Tell a full disk as the user's problem that it is."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise CtxextError(
                f'There is no space left for "{out}".',
                hint="Free some, or choose a place on the source's disk: there the weights are linked and take none.",
            ) from error
        raise


@contextlib.contextmanager
def staging_directory(out: Path) -> Iterator[Path]:
    """A folder beside OUT, gone afterwards whatever happens; what a killed run leaves, the next one clears."""
    out.parent.mkdir(parents=True, exist_ok=True)
    work = out.parent / f".{out.name}.ctxext-new-{os.getpid()}"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def give_name(work: Path, out: Path) -> None:
    """Give the finished folder its name; an old one steps aside first and is deleted last."""
    aside = out.parent / f".{out.name}.ctxext-old-{os.getpid()}"
    if out.exists():
        out.rename(aside)
    try:
        work.rename(out)
    except OSError:
        if aside.exists():
            aside.rename(out)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def recover(out: Path) -> None:
    """Clear what killed runs left beside OUT, and put back an OUT that was caught between two renames."""
    pattern = re.compile(rf"\.{re.escape(out.name)}\.ctxext-(new|old)-(\d+)")
    if not out.parent.is_dir():
        return
    for folder in sorted(out.parent.iterdir()):
        match = pattern.fullmatch(folder.name)
        if not match or is_running(int(match[2])):
            continue
        if match[1] == "old" and not out.exists():
            folder.rename(out)
        else:
            shutil.rmtree(folder, ignore_errors=True)


def is_running(process: int) -> bool:
    """Whether another process of this machine is alive; what bears this one's own number was left by an earlier."""
    if process == os.getpid():
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that it is there in full or not at all."""
    beside = path.with_name(f".{path.name}.ctxext-new-{os.getpid()}")
    try:
        beside.write_bytes(content)
        beside.replace(path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            beside.unlink()
