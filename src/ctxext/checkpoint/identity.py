"""Whether a folder is the source that a result was converted from: by content, as a name may have become another's."""

import hashlib
import json
from typing import Any

from ctxext.checkpoint.opening import Checkpoint, is_loadable
from ctxext.files.content import MANIFEST, open_regular

_BLOCK, _NUM_BLOCKS = 1 << 16, 32


def fingerprint(checkpoint: Checkpoint, *, with_config: bool = True) -> str:
    """Return a SHA-256 over the configuration and samples of the weights; large files are not read in full.

    Args:
        checkpoint: A checkpoint whose weights are local.
        with_config: Whether the configuration counts.
    """
    digest = hashlib.sha256()
    if with_config:
        digest.update(json.dumps(checkpoint.config, sort_keys=True).encode())
    for path in checkpoint.weight_files:
        if not is_loadable(path):
            continue
        with open_regular(checkpoint.folder / path) as file:
            size = checkpoint.size_of(path)
            digest.update(f"{path.as_posix()} {size}\n".encode())
            for block in range(_NUM_BLOCKS):
                file.seek(max(size - _BLOCK, 0) * block // (_NUM_BLOCKS - 1))
                digest.update(file.read(_BLOCK))
    return digest.hexdigest()


def is_source_of(source: Checkpoint, result: Checkpoint) -> bool:
    """Return whether a result was converted from this checkpoint, or trained after such a conversion.

    Results of version 0.3.0 and earlier record no fingerprint: their weights are compared, which training changed.
    """
    note = result.config.get("ctxext")
    note = note if isinstance(note, dict) else {}
    if not note.get("recipe"):
        return False
    if note.get("revision"):
        return bool(source.revision == note["revision"])
    origin: Any = (result.read_json(MANIFEST) or {}).get("source")
    recorded = origin.get("fingerprint") if isinstance(origin, dict) else None
    if recorded is not None:
        return bool(recorded == fingerprint(source))
    is_extended = isinstance(source.config.get("ctxext"), dict)
    if is_extended:
        return False
    weights = fingerprint(source, with_config=False)
    return weights == fingerprint(result, with_config=False)
