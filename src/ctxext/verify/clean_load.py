"""Load a checkpoint, or compare it with references, in a process that cannot import ctxext."""

import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ctxext.files.content import as_json
from ctxext.files.isolated import fault_within, last_line_of_errors, run_isolated
from ctxext.verify.checks_process import LOADED
from ctxext.verify.reference import reference_error


class ScriptFailedError(Exception):
    """A script ended with an error that no reference raised; its message is the last line of that.

    Attributes:
        signal: The signal that stopped it; 0 if none did.
        has_loaded: Whether the checkpoint had loaded and answered by then.
    """

    def __init__(self, message: str, *, signal: int, has_loaded: bool) -> None:
        super().__init__(message)
        self.signal, self.has_loaded = signal, has_loaded


def answer_of(script: str, task: Mapping[str, Any], references: Mapping[str, str] | None = None) -> dict[str, Any]:
    """What a script of this folder answers in a process that cannot import ctxext.

    Args:
        script: Its name, without .py.
        task: Its input, as JSON.
        references: The references that the task names, by method.

    Raises:
        CtxextError: a reference is at fault, or a file that it imports.
        ScriptFailedError: the script failed for another reason.
    """
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "task.json"
        path.write_text(as_json(task), encoding="utf-8")
        result = run_isolated(Path(__file__).with_name(f"{script}.py"), str(path))
    if result.returncode == 0:
        answer: dict[str, Any] = json.loads(result.stdout.strip().splitlines()[-1])
        return answer
    files = dict(references or {})
    shared = [path for file in set(files.values()) for path in Path(file).parent.glob("*.py")]
    if fault := fault_within(result, shared):
        names = [name for name, file in files.items() if file == fault[0]]
        raise reference_error(names or list(files), fault[1])
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


def load_in_clean_process(folder: Path, *, trust: bool, auto: str) -> LoadReport:
    """Load a model as its users do.

    Args:
        folder: The checkpoint.
        trust: Whether its modeling code may run.
        auto: The Auto class of transformers that loads it.
    """
    try:
        task = {"check": "load", "folder": str(folder.resolve()), "trust": trust, "auto": auto}
        return LoadReport(**answer_of("checks_process", task))
    except ScriptFailedError as error:
        if error.signal:
            return LoadReport(f"loading was stopped by signal {error.signal}, perhaps for lack of memory")
        return LoadReport(f"it does not load: {error}")
