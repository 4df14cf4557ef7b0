"""Write a planned conversion: beside its place first, then in one rename, so that no half-made folder is ever seen."""

import errno
import hashlib
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ctxext.converters.output_directory import check_out, full_disk_told, give_name, recover, staging_directory
from ctxext.converters.plan import Plan, manifest
from ctxext.files import MANIFEST, Progress, as_json, sha256_of

_CHUNK = 1 << 22
_CANNOT_LINK = (errno.EXDEV, errno.EPERM, errno.EACCES, errno.ENOTSUP, errno.EMLINK, errno.ENOSYS)


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
    with full_disk_told(out), staging_directory(out) as work:
        files = _write_small(plan, work)
        weights, num_linked, num_copied = _bring_weights(plan, work, copy=copy, digest=digest, progress=progress)
        (work / MANIFEST).write_text(as_json(manifest(plan, files, weights)), encoding="utf-8")
        if before_publishing is not None:
            before_publishing(work)
        give_name(work, out)
    size = sum(plan.source.size_of(path) for path in plan.weights)
    return Written(out, num_linked, num_copied, size)


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
