"""What every part that writes or checks files has in common: the record's name, digests, JSON text, progress."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

MANIFEST = "ctxext.json"
"""The file in which a converted checkpoint says what was done and what each file was."""

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it and how much in all."""

_CHUNK = 1 << 22


def sha256_of(path: Path) -> str:
    """A file's SHA-256, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_CHUNK):
            digest.update(piece)
    return digest.hexdigest()


def as_json(content: Mapping[str, Any]) -> str:
    """A JSON file's text, as transformers writes it."""
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def stamp_of(path: Path) -> list[int]:
    """A file's size and the time of its last change in nanoseconds, by which an edit shows without reading it."""
    found = path.stat()
    return [found.st_size, found.st_mtime_ns]


def has_stamp(path: Path, stamp: Sequence[int]) -> bool:
    """Whether a file still has its stamp; a file system that keeps whole seconds or microseconds may round the time."""
    size, time = stamp_of(path)
    then = stamp[1]
    return size == stamp[0] and time in (then, then // 1000 * 1000, then // 1_000_000_000 * 1_000_000_000)
