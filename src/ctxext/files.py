"""What every part that writes or checks files has in common: the record's name, digests, JSON text, progress."""

import hashlib
import json
from collections.abc import Callable, Mapping
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
