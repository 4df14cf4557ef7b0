"""What the scripts of this folder share that `clean_load.py` runs in a process without ctxext.

Each is given the path of a JSON file, its task, and prints one JSON object, its answer, in its last line.
"""

import importlib.util
import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

LOADED = "loaded"
"""The line that a script prints once the converted model has answered: a failure after it is the script's."""


def reference_at(path: str) -> Any:
    """A reference, as a module of a package made of its folder, so that it can import the files beside it."""
    package = sys.modules["references"] = types.ModuleType("references")
    package.__path__ = [str(Path(path).parent)]
    spec = importlib.util.spec_from_file_location(f"references.{Path(path).stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def stock_folder(out: Path, config: dict[str, Any], place: str) -> Path:
    """A folder with the stock configuration and links to the weights."""
    folder = Path(place)
    (folder / "config.json").write_text(json.dumps(config))
    for path in out.iterdir():
        if path.suffix in (".safetensors", ".bin") or path.name.endswith(".index.json"):
            (folder / path.name).symlink_to(path.resolve())
    return folder


def answer(compare: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Print what a comparison returns for the task on the command line."""
    task = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    sys.stdout.write(json.dumps(compare(task)) + "\n")
