"""Which files of a folder this package made, by its own records: only those may be replaced without a second word."""

import os
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path

from ctxext.checkpoint import read_json_object
from ctxext.errors import CtxextError
from ctxext.files import MANIFEST

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
    found = []
    for root, folders, names in os.walk(folder):
        inside = Path(root).relative_to(folder)
        paths = [inside / name for name in names]
        paths += [inside / name for name in folders if (Path(root) / name).is_symlink()]
        found += [name for path in paths if not _covers(known, name := path.as_posix())]
    return sorted(found)


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
