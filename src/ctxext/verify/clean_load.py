"""Load a checkpoint in a process that cannot import ctxext, and hear what it uses."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SCRIPT = Path(__file__).with_name("load_script.py")


@dataclass(frozen=True)
class LoadReport:
    """What a loaded model is.

    Attributes:
        error: Why it does not load; empty where it does.
        name: Its class.
        parameters: How many there are.
        missing: Weights that the files do not have.
        rotary: For each rotary embedding `module`, `layer_type`, `frequencies` and `scaling`.
    """

    error: str = ""
    name: str = ""
    parameters: int = 0
    missing: Sequence[str] = ()
    rotary: Sequence[dict[str, Any]] = ()


def load_in_clean_process(folder: Path, *, trust: bool) -> LoadReport:
    """Load a model as its users do.

    Args:
        folder: The checkpoint.
        trust: Whether its modeling code may run.
    """
    with tempfile.TemporaryDirectory() as place:
        command = f"import runpy; runpy.run_path({str(_SCRIPT)!r}, run_name='__main__')"
        result = subprocess.run(
            [sys.executable, "-c", command, str(folder.resolve()), "trust" if trust else "plain"],
            capture_output=True,
            text=True,
            cwd=place,
            env={**os.environ, "HF_MODULES_CACHE": place, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"},
            check=False,
        )
    if result.returncode < 0:
        return LoadReport(f"loading was stopped by signal {-result.returncode}, perhaps for lack of memory")
    if result.returncode != 0:
        return LoadReport(f"it does not load: {(result.stderr.strip().splitlines() or ['no message'])[-1]}")
    return LoadReport(**json.loads(result.stdout.strip().splitlines()[-1]))
