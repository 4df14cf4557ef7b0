"""Load a checkpoint in a process that cannot import ctxext, and hear what it uses."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ctxext.system.isolated import last_line_of_errors, run_isolated

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


def load_in_clean_process(folder: Path, *, trust: bool, auto: str) -> LoadReport:
    """Load a model as its users do.

    Args:
        folder: The checkpoint.
        trust: Whether its modeling code may run.
        auto: The Auto class of transformers that loads it.
    """
    result = run_isolated(_SCRIPT, str(folder.resolve()), "trust" if trust else "plain", auto)
    if result.returncode < 0:
        return LoadReport(f"loading was stopped by signal {-result.returncode}, perhaps for lack of memory")
    if result.returncode != 0:
        return LoadReport(f"it does not load: {last_line_of_errors(result)}")
    return LoadReport(**json.loads(result.stdout.strip().splitlines()[-1]))
