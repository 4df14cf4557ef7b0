"""Write a planned conversion: beside its place first, then in one rename, so that no half-made folder is ever seen."""

import contextlib
import errno
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ctxext.converters.plan import MANIFEST, Plan, as_json, manifest
from ctxext.errors import CtxextError

_CHUNK = 1 << 22
_CANNOT_LINK = (errno.EXDEV, errno.EPERM, errno.EACCES, errno.ENOTSUP, errno.EMLINK, errno.ENOSYS)
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Written:
    """What a conversion left behind.

    Attributes:
        folder: The new checkpoint.
        num_linked: Weight files that share their bytes with the source.
        num_copied: Weight files that were copied.
        weight_bytes: Size of all weight files.
    """

    folder: Path
    num_linked: int
    num_copied: int
    weight_bytes: int


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


def apply_plan(
    plan: Plan,
    out: Path,
    *,
    copy: bool = False,
    digest: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
    before_publishing: Callable[[Path], None] | None = None,
) -> Written:
    """Write a planned conversion.

    Args:
        plan: From `make_plan`.
        out: The folder to make.
        copy: Copy the weights even where they could be linked.
        digest: Compute the SHA-256 of the weights, which reads them.
        overwrite: Replace a folder that is there.
        progress: Called with a file's name, bytes done and bytes in all, for files that take time.
        before_publishing: Called with the finished folder before it gets its name; what it raises stops everything.

    Raises:
        CtxextError: OUT is refused, or the disk is full. Nothing is left behind then.
    """
    check_out(out, plan.source.folder, overwrite=overwrite)
    out = out.resolve()
    recover(out)
    with _full_disk_told(out), _workplace(out) as work:
        files = _write_small(plan, work)
        weights, num_linked, num_copied = _bring_weights(plan, work, copy=copy, digest=digest, progress=progress)
        (work / MANIFEST).write_text(as_json(manifest(plan, files, weights)), encoding="utf-8")
        if before_publishing is not None:
            before_publishing(work)
        _publish(work, out)
    size = sum(plan.source.size_of(path) for path in plan.weights)
    return Written(out, num_linked, num_copied, size)


def sha256_of(path: Path) -> str:
    """A file's SHA-256, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_CHUNK):
            digest.update(piece)
    return digest.hexdigest()


def _write_small(plan: Plan, work: Path) -> dict[str, str]:
    digests = {}
    for name, text in plan.texts.items():
        content = text.encode()
        (work / name).write_bytes(content)
        digests[name] = hashlib.sha256(content).hexdigest()
    for path in plan.others:
        target = work / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(plan.source.folder / path, target)
        digests[path.as_posix()] = sha256_of(target)
    return digests


def _bring_weights(
    plan: Plan, work: Path, *, copy: bool, digest: bool, progress: Progress | None
) -> tuple[dict[str, str | None], int, int]:
    digests: dict[str, str | None] = {}
    num_linked = 0
    for path in plan.weights:
        origin, target = (plan.source.folder / path).resolve(), work / path
        target.parent.mkdir(parents=True, exist_ok=True)
        if not copy and _linked(origin, target):
            num_linked += 1
            computed = sha256_of(origin) if digest else None
        else:
            computed = _copied(origin, target, progress)
        digests[path.as_posix()] = computed or plan.source.known_digest(path)
    return digests, num_linked, len(plan.weights) - num_linked


def _linked(origin: Path, target: Path) -> bool:
    try:
        os.link(origin, target)
    except OSError as error:
        if error.errno in _CANNOT_LINK:
            return False
        raise
    return True


def _copied(origin: Path, target: Path, progress: Progress | None) -> str:
    """Copy a file and return its SHA-256, which costs nothing more while the bytes pass by."""
    size, done, digest = origin.stat().st_size, 0, hashlib.sha256()
    if shutil.disk_usage(target.parent).free < size:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with origin.open("rb") as reading, target.open("wb") as writing:
        while piece := reading.read(_CHUNK):
            writing.write(piece)
            digest.update(piece)
            done += len(piece)
            if progress is not None:
                progress(target.name, done, size)
    return digest.hexdigest()


@contextlib.contextmanager
def _full_disk_told(out: Path) -> Iterator[None]:
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
def _workplace(out: Path) -> Iterator[Path]:
    """A folder beside OUT, gone afterwards whatever happens; what a killed run leaves, the next one clears."""
    out.parent.mkdir(parents=True, exist_ok=True)
    work = out.parent / f".{out.name}.ctxext-new-{os.getpid()}"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _publish(work: Path, out: Path) -> None:
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
        if not match or _is_running(int(match[2])):
            continue
        if match[1] == "old" and not out.exists():
            folder.rename(out)
        else:
            shutil.rmtree(folder, ignore_errors=True)


def _is_running(process: int) -> bool:
    if process == os.getpid():
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
