"""Small checkpoints that earlier versions of ctxext wrote, kept in `data/`."""

import json
import shutil
from pathlib import Path

DATA = Path(__file__).parent / "data"
VERSIONS = ("v0.1.0", "v0.2.0")
# What each checkpoint answered when it was written: the last logits of one prompt.
LOGITS = {version: json.loads((DATA / version / "logits.json").read_text()) for version in VERSIONS}


def lay_out(version: str, name: str, folder: Path) -> Path:
    """A checkpoint as it was written; files that several share are kept once, named by the start of their digest."""
    data = DATA / version
    shutil.copytree(data / name, folder)
    record = json.loads((folder / "ctxext.json").read_text())
    for file, digest in {**record["files"], **record["weights"]}.items():
        if not (folder / file).exists():
            shutil.copyfile(data / "shared" / f"{digest[:8]}-{file}", folder / file)
    return folder
