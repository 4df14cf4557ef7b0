"""A folder made beside its place and renamed when it is whole, so that no half-made one is ever seen."""

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from safetensors import SafetensorError

from ctxext.errors import CtxextError
from ctxext.files.content import MANIFEST
from ctxext.files.locks import host_name, locked, short_name
from ctxext.files.schemas import read_json_object
from ctxext.options import option, with_documented_options


@with_documented_options
@dataclass(frozen=True, kw_only=True)
class OverwriteOptions:
    """What may be deleted where a folder is to be written."""

    overwrite: bool = option(False, help="Replace OUT if ctxext made it.")
    overwrite_anything: bool = option(False, help="Replace OUT and delete whatever lies there.")

    @property
    def replaces(self) -> bool:
        """Whether a folder that ctxext made may be replaced."""
        return self.overwrite or self.overwrite_anything


_OF_OTHER_RECORDS: Mapping[str, tuple[str, ...]] = {
    "finetune.json": (
        "finetune.json",
        "loss.png",
        "steps.jsonl",
        "adapter/adapter_*",
        "adapter/README.md",
        "runs/*",
        "evaluation/cells*.jsonl",
        "evaluation/report.*",
        "evaluation/*.png",
    )
}
"""Records of trainings, and what lies beside them."""

_NOBODYS = (MANIFEST, ".gitattributes", ".cache/*", "__pycache__/*")
"""What the Hub's client and Python leave, and the record itself."""


def foreign_files(folder: Path) -> list[str]:
    """The files of a folder that no record of this package names, sorted; all of them where there is no record."""
    known = _recorded(folder)
    foreign = []
    for root, folders, names in os.walk(folder):
        inside = Path(root).relative_to(folder)
        paths = [inside / name for name in names]
        paths += [inside / name for name in folders if (Path(root) / name).is_symlink()]
        foreign += [name for path in paths if not _covers(known, name := path.as_posix())]
    return sorted(foreign)


def records_training(folder: Path, name: str) -> bool:
    """Whether a file of a folder, by its path in it, tells of a training: it is true of no other weights."""
    others = (others for record, others in _OF_OTHER_RECORDS.items() if (folder / record).is_file())
    return any(fnmatch(name, pattern) for patterns in others for pattern in patterns)


def _covers(known: tuple[set[str], set[str]], name: str) -> bool:
    names, patterns = known
    return name in names or any(fnmatch(name, pattern) for pattern in patterns)


def _recorded(folder: Path) -> tuple[set[str], set[str]]:
    """What the records in a folder name: files, and patterns of files."""
    names: set[str] = set()
    patterns: set[str] = set()
    try:
        manifest = read_json_object(folder / MANIFEST) if (folder / MANIFEST).is_file() else {}
    except CtxextError:
        manifest = {}
    if "ctxext" in manifest:
        for key in ("files", "weights"):
            listed = manifest.get(key)
            names.update(listed if isinstance(listed, dict) else ())
        patterns.update(_NOBODYS)
    for record, others in _OF_OTHER_RECORDS.items():
        if (folder / record).is_file():
            patterns.update((*others, *_NOBODYS))
    return names, patterns


_EXPLANATIONS: Mapping[int, tuple[str, str]] = {
    errno.ENOSPC: (
        'There is no space left for "{place}".',
        "Free some; eval and compare then go on with --resume, convert --link hard takes none beside the source.",
    ),
    errno.EDQUOT: ('There is no space left for "{place}": your quota is used up.', "Free some, or ask for more."),
    errno.EFBIG: ('A file is larger than is allowed where "{place}" lies.', "See ulimit -f and the disk's limits."),
    errno.EROFS: ('"{place}" lies on a disk that can only be read.', "Choose another place."),
    errno.EACCES: ('"{file}" may not be read or written.', "Check its permissions."),
    errno.EPERM: ('"{file}" may not be changed.', "Check its permissions and owner."),
    errno.ENAMETOOLONG: ('"{file}" is too long for a name.', "Choose a shorter one."),
    errno.ELOOP: ('"{file}" is a link that leads to itself.', "Name the folder itself."),
    errno.EIO: ('The disk reports an error on "{file}".', "Check the disk, then run the same command again."),
}
"""What the system refuses: what happened, and what to do."""


def check_out(out: Path, source: Path, options: OverwriteOptions) -> None:
    """Refuse a place that cannot or must not be written.

    Args:
        out: The folder to make.
        source: What it is made from.
        options: What may be replaced.
    """
    with explain_disk_errors(out):
        place, origin = out.resolve(), source.resolve()
        if place == origin or origin in place.parents:
            raise CtxextError(f'OUT "{out}" lies inside SOURCE "{source}".', hint="Choose a folder beside it.")
        if place in origin.parents:
            raise CtxextError(f'OUT "{out}" contains SOURCE "{source}".', hint="Choose another folder.")
        if place in (Path.cwd(), *Path.cwd().parents):
            raise CtxextError(f'OUT "{out}" is the folder you are in, or around it.', hint="Name a folder to make.")
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            place.stat()
        if (out.exists() or out.is_symlink()) and not out.is_dir():
            raise CtxextError(f'OUT "{out}" is a file.', hint="Choose another name.")
        check_contents(out, overwrite=options.replaces, deletable=deletable_files(out, options))
        nearest = next(folder for folder in place.parents if folder.exists())
        if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
            raise CtxextError(f'"{nearest}" cannot be written to.', hint="Choose another place for OUT.")


def check_contents(out: Path, *, overwrite: bool, deletable: Collection[str] = (), named: Path | None = None) -> None:
    """Refuse a folder whose files must not be lost.

    Args:
        out: Where the files are.
        overwrite: Whether what this package made may go.
        deletable: Other files that may go too.
        named: What errors call the folder.
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
            f'OUT "{named}" holds what ctxext did not make: {shown}.',
            hint="Move it away or choose another folder; --overwrite-anything deletes it.",
        )


@contextlib.contextmanager
def explain_disk_errors(out: Path) -> Iterator[None]:
    """Tell a full disk, a limit or a missing permission as the user's problem that it is."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        number, file = _what_failed(error)
        message, hint = _EXPLANATIONS.get(number, ("", ""))
        if not message:
            raise
        raise CtxextError(message.format(place=out, file=file or out), hint=hint) from error


def _what_failed(error: Exception) -> tuple[int, str]:
    """The system's number of an error and the file that it names; those that write weights tell it in words alone."""
    if isinstance(error, OSError):
        return error.errno or 0, str(error.filename or "")
    if isinstance(error, SafetensorError):
        code = re.search(r"os error ([0-9]+)", str(error))
        return int(code[1]) if code else 0, ""
    if str(error).startswith("Symlink loop"):  # Path.resolve before Python 3.13.
        return errno.ELOOP, ""
    # torch.save notices that less was written than it gave, and not why.
    return errno.ENOSPC if "inline_container" in str(error) and "unexpected pos" in str(error) else 0, ""


@contextlib.contextmanager
def output_directory(out: Path, sources: Iterable[Path], options: OverwriteOptions) -> Iterator[Path]:
    """A staging folder that takes OUT's name when the block ends without an error; nothing is left after one.

    Args:
        out: The folder to make, resolved.
        sources: What it is made from.
        options: What may be replaced.
    """
    with explain_disk_errors(out), staging_directory(out) as work:
        for source in sources:  # Another run may have finished between the caller's look and the lock.
            check_out(out, source, options)
        deletable = deletable_files(out, options)
        yield work
        give_name(work, out, overwrite=options.replaces, deletable=deletable)


@contextlib.contextmanager
def staging_directory(out: Path) -> Iterator[Path]:
    """A folder beside OUT, gone afterwards whatever happens; what a killed run leaves, the next one clears.

    OUT is locked meanwhile.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    with locked(out):
        recover(out)
        work = beside(out, "new")
        try:
            work.mkdir()
            yield work
            delete(work)
        except BaseException:
            delete(work)
            raise


def beside(out: Path, kind: str) -> Path:
    """The place of a folder that is "new" or "old", named so that another run knows whose it is."""
    return out.parent / f".{short_name(out.name)}.ctxext-{kind}-{host_name()}-{os.getpid()}"


def give_name(work: Path, out: Path, *, overwrite: bool = True, deletable: Collection[str] = ()) -> None:
    """Give the finished folder its name; an old one steps aside first and is deleted last.

    Args:
        work: The finished folder.
        out: Its name to be.
        overwrite: Whether what this package made may go.
        deletable: Other files that may go too: what `deletable_files` found when the run began.
    """
    aside = beside(out, "old")
    try:
        if out.is_dir() and any(out.iterdir()):
            # Looked through again once it has moved, so that nothing can be added behind the look.
            out.rename(aside)
            check_contents(aside, overwrite=overwrite, deletable=deletable, named=out)
        work.rename(out)
    except BaseException as error:  # Ctrl-C and SIGTERM among them.
        if aside.exists():
            with contextlib.suppress(OSError):
                aside.rename(out)
        is_full = isinstance(error, OSError) and error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)
        if not (is_full or isinstance(error, CtxextError)):
            raise
        kept = next(place for place in _numbered(out) if not place.exists())
        work.rename(kept)
        raise CtxextError(
            f'OUT "{out}" was filled while this ran: what it holds stays, the result is "{kept}".',
            hint="Rename one of the two.",
        ) from error
    delete(aside)


def _numbered(out: Path) -> Iterator[Path]:
    number = 2
    while True:
        yield out.with_name(f"{short_name(out.name)}-{number}")
        number += 1


def deletable_files(out: Path, options: OverwriteOptions) -> Collection[str]:
    """Files of others that may be deleted: with --overwrite-anything those in OUT now, but none that arrive later."""
    return foreign_files(out) if options.overwrite_anything else ()


def discard(folder: Path) -> None:
    """Delete a folder so that it is there whole or not at all; what a kill leaves of it, the next run clears."""
    leftover = beside(folder, "new")
    try:
        with contextlib.suppress(FileNotFoundError):
            folder.rename(leftover)
        delete(leftover)
    except BaseException:
        delete(leftover)
        raise


def delete(folder: Path) -> None:
    """Delete a folder if it is there; Ctrl-C and SIGTERM in between are raised when it is gone."""
    try:
        shutil.rmtree(folder, ignore_errors=True)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def recover(out: Path) -> None:
    """Clear what killed runs of this machine left beside OUT, and put back an OUT caught between two renames."""
    pattern = re.compile(rf"\.{re.escape(short_name(out.name))}\.ctxext-(new|old)-(?:(\w+)-)?(\d+)")
    if not out.parent.is_dir():
        return
    for folder in sorted(out.parent.iterdir()):
        match = pattern.fullmatch(folder.name)
        if not match or match[2] not in (None, host_name()) or is_running(int(match[3])):
            continue
        if match[1] == "old" and not out.exists():
            folder.rename(out)
        elif folder.is_dir():
            shutil.rmtree(folder, ignore_errors=True)
        else:
            folder.unlink(missing_ok=True)


def is_running(process: int) -> bool:
    """Whether another process of this machine is alive; what bears this one's own number was left by an earlier."""
    if process == os.getpid():
        return False
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that it is there in full or not at all."""
    beside_it = beside(path, "new")
    with explain_disk_errors(path):
        recover(path)
        try:
            beside_it.write_bytes(content)
            beside_it.replace(path)
        finally:
            with contextlib.suppress(OSError):
                beside_it.unlink()
