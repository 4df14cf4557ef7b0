"""Write a planned conversion: beside its place first, then in one rename, so that no half-made folder is ever seen."""

import hashlib
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ctxext.converters.links import COPIED, HARD, SHARED, SYMBOLIC, bring, check_link
from ctxext.converters.plan import Plan, manifest
from ctxext.converters.rewrite import REWRITTEN, rewrite
from ctxext.system.files import MANIFEST, Progress, as_json, check_room, copy_whole, sha256_of, stamp_of
from ctxext.system.output_directory import check_out, doomed_files, full_disk_told, give_name, staging_directory

_MANY = 4
"""Files copied at once; the kernel does the work."""

SHARED_NOTES: Mapping[str, str] = {
    HARD: "the weight files are hard links: one file with the source's. They lost their write bit, in the source too; "
    "whoever writes to one all the same, as root can, changes both.",
    SYMBOLIC: "the weight files are symbolic links into the source: moving or changing it breaks or changes them.",
}
"""What the user of linked weights must know."""


@dataclass(frozen=True)
class Written:
    """What a conversion left behind.

    Attributes:
        folder: The new checkpoint.
        ways: How each weight file came there, by name: "cloned", "hard-linked", "symlinked", "copied" or "rewritten".
        weight_bytes: Size of all weight files.
    """

    folder: Path
    ways: Mapping[str, str]
    weight_bytes: int

    @property
    def num_linked(self) -> int:
        """Weight files that took no space: clones and links."""
        return sum(how not in (COPIED, REWRITTEN) for how in self.ways.values())

    @property
    def num_copied(self) -> int:
        """Weight files that were copied."""
        return sum(how == COPIED for how in self.ways.values())

    @property
    def how(self) -> str:
        """How the weights came there, in a word or two."""
        return ", ".join(sorted(set(self.ways.values()))) or COPIED

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user must know of linked weights."""
        return tuple(note for how, note in SHARED_NOTES.items() if how in self.ways.values())


def apply_plan(
    plan: Plan,
    out: Path,
    *,
    link: str = "auto",
    digest: bool = False,
    overwrite: bool = False,
    overwrite_anything: bool = False,
    progress: Progress | None = None,
    before_publishing: Callable[[Path], None] | None = None,
) -> Written:
    """Write a planned conversion.

    Args:
        plan: From `make_plan`.
        out: The folder to make.
        link: How the weights come there: "auto" (cloned, else copied), "reflink", "hard", "symlink" or "copy".
        digest: Compute the SHA-256 of the weights, which reads them.
        overwrite: Replace a folder that this package made.
        overwrite_anything: Replace it whatever lies there.
        progress: Called with a file's name, bytes done and bytes in all, for files that take time.
        before_publishing: Called with the finished folder before it gets its name; what it raises stops everything.

    Raises:
        CtxextError: OUT is refused, or the disk is full. Nothing is left behind then.
    """
    check_link(link)
    check_out(out, plan.source.folder, overwrite=overwrite, overwrite_anything=overwrite_anything)
    out = out.resolve()
    with full_disk_told(out), staging_directory(out) as work:
        # Another run may have finished between the first look and the lock.
        check_out(out, plan.source.folder, overwrite=overwrite, overwrite_anything=overwrite_anything)
        doomed = doomed_files(out, overwrite_anything=overwrite_anything)
        ways = _bring_weights(plan, work, link, progress)
        files = _write_small(plan, work, ways)
        weights = {name: _digest(plan, name, work, how, digest or link == "copy") for name, how in ways.items()}
        record = {**manifest(plan, files, weights), **_stamps(work, ways)}
        (work / MANIFEST).write_text(as_json(record), encoding="utf-8")
        if before_publishing is not None:
            before_publishing(work)
        give_name(work, out, overwrite=overwrite or overwrite_anything, doomed=doomed)
    size = sum(plan.source.size_of(path) for path in plan.weights)
    return Written(out, ways, size)


def _write_small(plan: Plan, work: Path, ways: Mapping[str, str]) -> dict[str, str]:
    digests = {}
    notes = [note for how, note in SHARED_NOTES.items() if how in ways.values()]
    for name, text in plan.texts.items():
        said = [f"\n> On the disk where this was made, {note}\n" for note in notes if name == "README.md"]
        content = "".join((text, *said)).encode()
        (work / name).write_bytes(content)
        digests[name] = hashlib.sha256(content).hexdigest()
    for path in plan.others:
        target = work / path
        target.parent.mkdir(parents=True, exist_ok=True)
        copy_whole(plan.source.folder / path, target)
        digests[path.as_posix()] = sha256_of(target)
    return digests


def _bring_weights(plan: Plan, work: Path, link: str, progress: Progress | None) -> dict[str, str]:
    """Bring every weight file, several at once; gives how each came there."""
    origins = {path: (plan.source.folder / path).resolve() for path in plan.weights}
    for path in origins:
        (work / path).parent.mkdir(parents=True, exist_ok=True)
    needed = sum(origin.stat().st_size for origin in origins.values())
    if link == "copy":
        check_room(work, needed)
    is_over = threading.Event()

    def told(name: str, done: int, total: int) -> None:
        if is_over.is_set():
            raise InterruptedError
        if progress is not None:
            progress(name, done, total)

    with ThreadPoolExecutor(_MANY) as pool:
        brought = {}
        for path, origin in origins.items():
            tensors = [tensor for tensor in plan.rewritten if tensor.path == path]
            way = partial(rewrite, tensors=tensors) if tensors else partial(bring, link=link)
            brought[path] = pool.submit(way, origin, work / path, progress=told)
        try:
            return {path.as_posix(): future.result() for path, future in brought.items()}
        finally:  # Nobody waits for the rest of a large file where one has failed, or Ctrl-C was pressed.
            is_over.set()
            pool.shutdown(wait=False, cancel_futures=True)


def _digest(plan: Plan, name: str, work: Path, how: str, wanted: bool) -> str | None:
    """A weight file's digest: where it costs nothing, or where it was asked for."""
    known = None if how == REWRITTEN else plan.source.known_digest(Path(name))
    return known or (sha256_of(work / name) if wanted else None)


def _stamps(work: Path, ways: Mapping[str, str]) -> dict[str, Any]:
    """What `verify` knows weight files by where no digest was taken: size, time, and how each came there."""
    shared = {
        name: str((work / name).readlink()) if how == SYMBOLIC else how for name, how in ways.items() if how in SHARED
    }
    return {"stamps": {name: stamp_of(work / name) for name in sorted(ways)}, **({"links": shared} if shared else {})}
