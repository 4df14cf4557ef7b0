"""Write output atomically: one writer at a time, in a temporary folder next to it, renamed when complete."""

import contextlib
import errno
import hashlib
import itertools
import logging
import os
import re
import shutil
import socket
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from filelock import FileLock, Timeout
from safetensors import SafetensorError

from ctxext.errors import CtxextError
from ctxext.files.content import DEMO, MANIFEST
from ctxext.files.processes import rank
from ctxext.files.schemas import read_json_object
from ctxext.options import option, with_documented_options

_LOG = logging.getLogger(__name__)


@with_documented_options
@dataclass(frozen=True, kw_only=True)
class OverwriteOptions:
    """Files that may be deleted when a folder is written."""

    overwrite: bool = option(False, help="Replace OUT if it was created by ctxext.", kept=False)
    overwrite_anything: bool = option(False, help="Replace OUT and delete all files in it.", kept=False)

    @property
    def replaces(self) -> bool:
        """Whether a folder created by ctxext may be replaced."""
        return self.overwrite or self.overwrite_anything


_OF_THE_MACHINE = "4026531836"
"""Linux's number of the namespace of process ids outside of containers (PROC_PID_INIT_INO)."""

_TRAINING_RECORD = "finetune.json"
_OF_TRAINING = (
    _TRAINING_RECORD,
    "loss.png",
    "steps.jsonl",
    "adapter/adapter_*",
    "adapter/README.md",
    "runs/*",
    "evaluation/cells*.jsonl",
    "evaluation/report.*",
    "evaluation/*.png",
)
"""The record of a training run, and its other files."""

_BY_TOOLS = (MANIFEST, ".gitattributes", ".cache/*", "__pycache__/*")
"""Files created by the Hub's client and Python, and the record itself."""


def foreign_files(folder: Path) -> list[str]:
    """Return the files of a folder that no record of ctxext lists, sorted; all files without a record."""
    names: set[str] = set()
    patterns: set[str] = set()
    with contextlib.suppress(CtxextError):
        manifest = read_json_object(folder / MANIFEST) if (folder / MANIFEST).is_file() else {}
        if "ctxext" in manifest:
            names = {*(manifest.get("files") or ()), *(manifest.get("weights") or ())}
            patterns.update(_BY_TOOLS)
    if (folder / _TRAINING_RECORD).is_file():
        patterns.update((*_OF_TRAINING, *_BY_TOOLS))
    files = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    paths = (path.relative_to(folder).as_posix() for path in files)
    return sorted(path for path in paths if path not in names and not any(fnmatch(path, each) for each in patterns))


def records_training(folder: Path, name: str) -> bool:
    """Return whether a file, by its path in a folder, belongs to a training run and is not valid for other weights."""
    return (folder / _TRAINING_RECORD).is_file() and any(fnmatch(name, pattern) for pattern in _OF_TRAINING)


_EXPLANATIONS: Mapping[int, tuple[str, str]] = {
    errno.ENOSPC: (
        'No space left on the disk of "{place}".',
        "Free some space, then continue finetune, eval, compare and search with --resume. convert --link hard needs no "
        "extra space.",
    ),
    errno.EDQUOT: ('Disk quota exceeded for "{place}".', "Free some space, or request a larger quota."),
    errno.EFBIG: ('A file exceeds the maximum size on the disk of "{place}".', "Check ulimit -f and the file system."),
    errno.EROFS: ('"{place}" is on a read-only disk.', "Choose another path."),
    errno.EACCES: ('Permission denied for "{file}".', "Check its permissions."),
    errno.EPERM: ('"{file}" cannot be changed.', "Check its permissions and owner."),
    errno.ENAMETOOLONG: ('The name "{file}" is too long.', "Choose a shorter name."),
    errno.ELOOP: ('"{file}" is a link to itself.', "Use the path of the folder itself."),
    errno.EIO: ('The disk reports an error on "{file}".', "Check the disk, then run the same command again."),
}
"""Message and hint by error number of the operating system."""


def check_name(out: Path) -> None:
    """Raise if a path would hide the demo checkpoint: from then on, its name would mean that path."""
    if out.resolve() == Path(DEMO).resolve():
        raise CtxextError(
            f'OUT "{out}" has the name of the demo checkpoint, which "{DEMO}" would no longer mean in this folder.',
            hint=f"Choose another name, for example {DEMO}-2k.",
        )


def check_out(out: Path, source: Path, options: OverwriteOptions) -> None:
    """Raise if a path cannot or must not be written.

    Args:
        out: The folder to create.
        source: Its source.
        options: What may be replaced.
    """
    with explain_disk_errors(out):
        place, origin = out.resolve(), source.resolve()
        if place == origin:
            raise CtxextError(f'OUT "{out}" is SOURCE itself.', hint="Choose a new folder; SOURCE is never changed.")
        check_name(out)
        if origin in place.parents:
            raise CtxextError(f'OUT "{out}" is inside SOURCE "{source}".', hint="Choose a folder outside it.")
        if place in origin.parents:
            raise CtxextError(f'OUT "{out}" contains SOURCE "{source}".', hint="Choose another folder.")
        if place in (Path.cwd(), *Path.cwd().parents):
            raise CtxextError(f'OUT "{out}" contains the current folder.', hint="Choose a new folder.")
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            place.stat()
        if (out.exists() or out.is_symlink()) and not out.is_dir():
            raise CtxextError(f'OUT "{out}" is a file.', hint="Choose another name.")
        check_contents(out, overwrite=options.replaces, deletable=deletable_files(out, options))
        check_parent(out)


def check_out_file(out: Path, options: OverwriteOptions, is_ours: Callable[[Path], bool], other: str) -> None:
    """Raise if a file cannot or must not be written.

    Args:
        out: The file to create.
        options: What may be replaced.
        is_ours: Returns whether a file is one that --overwrite replaces.
        other: Predicate of the message about any other file, to follow its name.
    """
    if out.is_dir():
        raise CtxextError(f'OUT "{out}" is a folder.', hint="Specify a file name.")
    if out.exists() or out.is_symlink():
        if not options.replaces:
            raise CtxextError(f'OUT "{out}" exists.', hint="Choose another name, or replace it with --overwrite.")
        if not options.overwrite_anything and not is_ours(out):
            raise CtxextError(f'OUT "{out}" {other}.', hint="Choose another name, or add --overwrite-anything.")
    check_parent(out)


def check_parent(out: Path) -> None:
    """Raise if the folder of OUT, or the nearest one that exists, is not writable."""
    nearest = next(folder for folder in out.resolve().parents if folder.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        raise CtxextError(f'"{nearest}" is not writable.', hint="Choose another path for OUT.")


def check_contents(out: Path, *, overwrite: bool, deletable: Collection[str] = (), named: Path | None = None) -> None:
    """Raise if a folder contains files that must not be lost.

    Args:
        out: The folder of the files.
        overwrite: Whether files created by ctxext may be deleted.
        deletable: Other files that may be deleted too.
        named: The folder's name in errors.
    """
    named = named or out
    if not out.is_dir() or not any(out.iterdir()):
        return
    if not overwrite:
        raise CtxextError(f'OUT "{named}" is not empty.', hint="Choose another folder, or replace it with --overwrite.")
    foreign = [name for name in foreign_files(out) if name not in deletable]
    if foreign:
        shown = ", ".join(f'"{name}"' for name in foreign[:5]) + (f" and {len(foreign) - 5} more" * (len(foreign) > 5))
        raise CtxextError(
            f'OUT "{named}" contains files that ctxext did not create: {shown}.',
            hint="Move them or choose another folder. To delete them, use --overwrite-anything.",
        )


@contextlib.contextmanager
def explain_disk_errors(out: Path) -> Iterator[None]:
    """Convert errors of full disks, limits and missing permissions to errors with a hint."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        number, file = _error_number_and_file(error)
        message, hint = _EXPLANATIONS.get(number, ("", ""))
        if not message:
            raise
        raise CtxextError(message.format(place=out, file=file or out), hint=hint) from error


def _error_number_and_file(error: Exception) -> tuple[int, str]:
    """Return the system's error number and the file; some libraries report the number only as text."""
    if isinstance(error, OSError):
        return error.errno or 0, str(error.filename or "")
    if isinstance(error, SafetensorError):
        code = re.search(r"os error ([0-9]+)", str(error))
        return int(code[1]) if code else 0, ""
    if str(error).startswith("Symlink loop"):  # Raised by Path.resolve before Python 3.13.
        return errno.ELOOP, ""
    # torch.save reports an incomplete write without its reason.
    return errno.ENOSPC if "inline_container" in str(error) and "unexpected pos" in str(error) else 0, ""


@contextlib.contextmanager
def lock_output(out: Path, wait: float = 0.1) -> Iterator[None]:
    """Prevent other processes and threads from writing an output until the block ends.

    The lock is `.NAME.ctxext-lock` next to the output and is removed afterwards. The same thread may acquire it again.

    Args:
        out: The folder or file to write; its parent folder must exist.
        wait: Seconds to wait for another process. Not 0: filelock retries a lock that is removed while it is opened.
    """
    check_name(out)
    out = out.resolve()
    path = out.parent / f".{short_name(out.name)}.ctxext-lock"
    lock = FileLock(path, is_singleton=True)
    is_first = not lock.is_locked
    try:
        lock.acquire(timeout=wait)
    except Timeout as error:
        raise CtxextError(
            f'Another process is writing "{out}"{_holder(path)}.',
            hint="Wait until it has finished, or choose another path.",
        ) from error
    except OSError as error:
        raise CtxextError(f'"{path.parent}" is not writable: {error.strerror}.', hint="Choose another path.") from error
    try:
        if is_first:
            with contextlib.suppress(OSError):  # The disk may be full; the content is only for the error message.
                path.write_text(f"process {os.getpid()} on {_host_name()}", encoding="ascii")
        yield
    finally:
        if is_first:  # Removed before the release: a process that has opened it detects this and creates a new one.
            with contextlib.suppress(OSError):  # Windows cannot remove an open file.
                path.unlink()
        lock.release()


@contextlib.contextmanager
def only_run_in(out: Path) -> Iterator[None]:
    """Lock OUT for a whole run, so that two runs do not mix results; the processes of one run share the lock."""
    if rank() != 0:
        yield
        return
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CtxextError(f'"{out}" cannot be created: {error.strerror}.', hint="Choose another path.") from error
    with lock_output(out):
        yield


def _holder(path: Path) -> str:
    """Return the process in a lock file, in parentheses; empty if the file has another format."""
    with contextlib.suppress(OSError):
        content = path.read_bytes()[:99].decode("ascii", "replace")
        return f" ({content})" if re.fullmatch(r"process [0-9]+ on \w+", content) else ""
    return ""


def _host_name() -> str:
    """Return a name of this machine for files; process ids of another container with its name differ.

    Unlike `machine_id` it stays after a restart, so that the files of a killed run are still found.
    """
    host = re.sub(r"[^A-Za-z0-9]", "_", socket.gethostname())[:40] or "host"
    with contextlib.suppress(OSError):
        namespace = re.sub(r"\D", "", str(Path("/proc/self/ns/pid").readlink()))
        return host if namespace in ("", _OF_THE_MACHINE) else f"{host}_{namespace}"
    return host


def short_name(name: str) -> str:
    """Return a name with room for a suffix; a long name is truncated and gets its digest."""
    raw = os.fsencode(name)
    return name if len(raw) <= 120 else f"{name[:24]}-{hashlib.sha256(raw).hexdigest()[:16]}"


@contextlib.contextmanager
def output_directory(out: Path, sources: Iterable[Path], options: OverwriteOptions) -> Iterator[Path]:
    """Yield a staging folder that is renamed to OUT when the block ends, and deleted after an error.

    Args:
        out: The folder to create, resolved.
        sources: Its sources.
        options: What may be replaced.
    """
    with explain_disk_errors(out), staging_directory(out) as work:
        for source in sources:  # Another run may have finished between the caller's check and the lock.
            check_out(out, source, options)
        deletable = deletable_files(out, options)
        yield work
        give_name(work, out, overwrite=options.replaces, deletable=deletable)


@contextlib.contextmanager
def staging_directory(out: Path) -> Iterator[Path]:
    """Lock OUT and yield an empty folder next to it, for `give_name`."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with lock_output(out), beside(out) as place:
        work = place / place.name  # Different in every run: transformers caches modules by this name.
        work.mkdir()
        yield work


@contextlib.contextmanager
def beside(out: Path) -> Iterator[Path]:
    """Yield a temporary folder next to a file or folder. The next run deletes it if this one is killed.

    Its entry "old" is moved back to OUT if OUT does not exist.
    """
    place = out.parent / f".{short_name(out.name)}.ctxext-{_host_name()}-{os.getpid()}"
    try:
        recover(out)
        place.mkdir()
        yield place
        _clear(place, out)
    except BaseException:  # Includes Ctrl-C and SIGTERM, also during the clearing.
        _clear(place, out)
        raise


def recover(out: Path) -> None:
    """Delete temporary folders of killed runs next to OUT, and restore OUT after a kill between the two renames."""
    pattern = re.compile(rf"\.{re.escape(short_name(out.name))}\.ctxext-{_host_name()}-(\d+)")
    for place in sorted(out.parent.iterdir() if out.parent.is_dir() else ()):
        match = pattern.fullmatch(place.name)
        if match and not is_running(int(match[1])):
            _clear(place, out)


def _clear(place: Path, out: Path) -> None:
    if os.path.lexists(place / "old") and not os.path.lexists(out):
        (place / "old").rename(out)
    shutil.rmtree(place, ignore_errors=True)


def give_name(work: Path, out: Path, *, overwrite: bool = True, deletable: Collection[str] = ()) -> None:
    """Rename the finished folder to OUT. An old OUT is moved first and deleted with the staging folder.

    Args:
        work: The finished folder, in a folder from `beside`.
        out: The new name.
        overwrite: Whether files created by ctxext may be deleted.
        deletable: Other files that may be deleted: the result of `deletable_files` when the run began.
    """
    try:
        if out.is_dir() and any(out.iterdir()):
            # Check again after the move, when no other process can add files.
            out.rename(work.with_name("old"))
            check_contents(work.with_name("old"), overwrite=overwrite, deletable=deletable, named=out)
        work.rename(out)
        _LOG.debug("renamed %s to %s", work, out)
    except (OSError, CtxextError) as error:
        if isinstance(error, OSError) and error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
        numbered = (out.with_name(f"{short_name(out.name)}-{number}") for number in itertools.count(2))
        free = next(place for place in numbered if not place.exists())
        work.rename(free)
        raise CtxextError(
            f'OUT "{out}" was created by another process and is kept; the result is in "{free}".',
            hint="Rename one of the two.",
        ) from error


def deletable_files(out: Path, options: OverwriteOptions) -> Collection[str]:
    """Return the foreign files that may be deleted: with --overwrite-anything, those in OUT now."""
    return foreign_files(out) if options.overwrite_anything else ()


def discard(folder: Path) -> None:
    """Delete a folder atomically."""
    with beside(folder) as place, contextlib.suppress(FileNotFoundError):
        folder.rename(place / "discarded")


def is_running(process: int) -> bool:
    """Return whether another process has this id; this process's id belonged to an earlier one.

    A process that has ended keeps its id as a zombie until its parent reads its exit code.
    """
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    import psutil  # Most commands do not need it.

    try:
        return process != os.getpid() and psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def write_whole(path: Path, content: bytes) -> None:
    """Write a file atomically."""
    with explain_disk_errors(path), beside(path) as place:
        (place / "new").write_bytes(content)
        (place / "new").replace(path)
