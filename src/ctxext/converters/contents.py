"""Which files of a folder this package made, by its own records: only those may be replaced without a second word."""

import os
from collections.abc import Mapping
from pathlib import Path

from ctxext.checkpoint import read_json_object
from ctxext.errors import CtxextError
from ctxext.files import MANIFEST

_OF_OTHER_RECORDS: Mapping[str, tuple[str, ...]] = {"finetune.json": ("finetune.json", "loss.png", "adapter", "runs")}
"""Records of folders that are no checkpoint, and what lies beside them."""

_NOBODYS = (MANIFEST, ".gitattributes", ".cache", "__pycache__")
"""What the Hub's client and Python leave, and the record itself."""


def foreign_files(folder: Path) -> list[str]:
    """The files of a folder that no record of this package names, sorted; all of them where there is no record."""
    known = _recorded(folder)
    found = []
    for root, folders, names in os.walk(folder):
        inside = Path(root).relative_to(folder)
        paths = [inside / name for name in names]
        paths += [inside / name for name in folders if (Path(root) / name).is_symlink()]
        found += [path.as_posix() for path in paths if not _covers(known, path)]
    return sorted(found)


def _covers(known: set[str], path: Path) -> bool:
    return path.as_posix() in known or (bool(known) and path.parts[0] in known)


def _recorded(folder: Path) -> set[str]:
    known: set[str] = set()
    try:
        manifest = read_json_object(folder / MANIFEST) if (folder / MANIFEST).is_file() else {}
    except CtxextError:
        manifest = {}
    if "ctxext" in manifest:
        for key in ("files", "weights"):
            listed = manifest.get(key)
            known.update(listed if isinstance(listed, dict) else ())
        known.update(_NOBODYS)
    for record, names in _OF_OTHER_RECORDS.items():
        if (folder / record).is_file():
            known.update((*names, *_NOBODYS))
    return known
