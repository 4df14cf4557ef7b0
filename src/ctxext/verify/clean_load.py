"""Load a checkpoint, or compare it with references, in a process that cannot import ctxext."""

import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ctxext.checkpoint.auto_class import auto_class
from ctxext.checkpoint.opening import Checkpoint
from ctxext.files.content import as_json
from ctxext.files.isolated import fault_within, last_line_of_errors, run_isolated
from ctxext.recipes.code.staging import staged
from ctxext.verify.checks_process import LOADED
from ctxext.verify.reference import reference_error

SCRIPT = Path(__file__).with_name("clean_process.py")


class ScriptFailedError(Exception):
    """A script ended with an error that no reference raised; its message is the last line of that.

    Attributes:
        signal: The signal that stopped it; 0 if none did.
        has_loaded: Whether the checkpoint had loaded and answered by then.
    """

    def __init__(self, message: str, *, signal: int, has_loaded: bool) -> None:
        super().__init__(message)
        self.signal, self.has_loaded = signal, has_loaded


def answer_of(
    checkpoint: Checkpoint, task: Mapping[str, Any], *, methods: Sequence[str] = (), foreign: bool = False
) -> dict[str, Any]:
    """Return the answer of a check of `clean_process.py` in a process that cannot import ctxext.

    Args:
        checkpoint: The checkpoint, which the process loads from a stage.
        task: The input of the check, as JSON; `check` is its name.
        methods: The methods whose references the check uses.
        foreign: The user allowed code that ctxext did not write: it is loaded from the folder as it is.

    Raises:
        CtxextError: a reference is at fault.
        ScriptFailedError: the script failed for another reason.
    """
    with staged(checkpoint, foreign=foreign) as stage, tempfile.TemporaryDirectory() as place:
        path = Path(place) / "task.json"
        content = {**task, "folder": str(stage.folder.resolve()), "trust": stage.trust}
        path.write_text(as_json(content), encoding="utf-8")
        result = run_isolated(SCRIPT, str(path))
    if result.returncode == 0:
        answer: dict[str, Any] = json.loads(result.stdout.strip().splitlines()[-1])
        return answer
    if fault := fault_within(result, SCRIPT.parent.glob("references/*.py")):
        raise reference_error(methods, fault[1])
    raise ScriptFailedError(
        last_line_of_errors(result),
        signal=max(-result.returncode, 0),
        has_loaded=LOADED in result.stdout.splitlines(),
    )


@dataclass(frozen=True)
class LoadReport:
    """What a loaded model is.

    Attributes:
        error: Why it does not load; empty if it does.
        name: Its class.
        parameters: The number of parameters.
        missing: Weights that the files do not have.
        rotary: For each rotary embedding `module`, `layer_type`, `frequencies` and `scaling`.
    """

    error: str = ""
    name: str = ""
    parameters: int = 0
    missing: Sequence[str] = ()
    rotary: Sequence[dict[str, Any]] = ()


def lacks_package(config: Mapping[str, Any], error: str) -> str:
    """Return what a quantized checkpoint needs that is not installed; empty if an error has another reason."""
    if not (config.get("quantization_config") and re.search(r"(Import|ModuleNotFound|PackageNotFound)Error", error)):
        return ""
    return error.partition("Error: ")[2] or error


def load_in_clean_process(checkpoint: Checkpoint, *, foreign: bool) -> LoadReport:
    """Load a model as its users do.

    Args:
        checkpoint: The checkpoint.
        foreign: The user allowed code that ctxext did not write: it is loaded from the folder as it is.
    """
    try:
        task = {"check": "load", "auto": auto_class(checkpoint.config)}
        return LoadReport(**answer_of(checkpoint, task, foreign=foreign))
    except ScriptFailedError as error:
        if error.signal:
            return LoadReport(f"loading was stopped by signal {error.signal}, perhaps for lack of memory")
        return LoadReport(f"it does not load: {error}")
