"""The published configurations of tests/resources/configs, and checkpoints that have nothing else."""

import json
import struct
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "resources" / "configs"
NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))


@cache
def published(name: str) -> dict[str, Any]:
    """What one file says."""
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def write(name: str, folder: Path) -> Path:
    """The model's config.json beside weights that hold nothing."""
    return write_config(published(name)["config"], folder)


def write_config(config: dict[str, Any], folder: Path) -> Path:
    """A config.json beside weights that hold nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    header = json.dumps({"empty": {"dtype": "BF16", "shape": [0], "data_offsets": [0, 0]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    return folder
