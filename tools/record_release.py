"""Record the modeling code of this version in recipes/code/released.json, so that later ones know its checkpoints.

Run it when a version is released: python tools/record_release.py [LABEL], where the label is the version by default. A
label that is recorded already is not changed.
"""

import hashlib
import json
import sys
from pathlib import Path

from ctxext.recipes.code.layout import AUTO_CLASSES, SHARED_FILES, STUB_STYLE
from ctxext.recipes.code.method import PORTABLE, CodeMethod
from ctxext.recipes.registry import METHODS
from ctxext.version import __version__

FILE = Path(__file__).parents[1] / "src" / "ctxext" / "recipes" / "code" / "released.json"


def entry() -> dict:
    """What a later version must know of this one."""
    code = [method for method in METHODS if issubclass(method, CodeMethod)]
    methods = {
        method.name: {
            "title": method.title,
            "class": method.code_class,
            "files": [file.name for file in method.code],
        }
        for method in code
    }
    shared = {encoding: list(files) for encoding, files in SHARED_FILES.items()}
    names = sorted(
        {name for files in shared.values() for name in files} | {file.name for method in code for file in method.code}
    )
    digests = {name: hashlib.sha256((PORTABLE / name).read_bytes()).hexdigest() for name in names}
    return {
        "stub": STUB_STYLE,
        "auto_classes": list(AUTO_CLASSES),
        "shared": shared,
        "methods": methods,
        "digests": digests,
    }


def main() -> None:
    """Add this version to the file."""
    releases = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    label = sys.argv[1] if len(sys.argv) > 1 else __version__
    if label in releases:
        sys.exit(f"{label} is recorded already.")
    FILE.write_text(json.dumps({**releases, label: entry()}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
