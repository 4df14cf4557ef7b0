"""Forks of a Python that has torch and transformers loaded, and nothing of ctxext, in the place of new ones.

What ctxext checks in a clean process takes a tenth of a second, and starting Python, torch and transformers for it
several seconds. `run` takes the same arguments as `subprocess.run` and executes the same code; `conftest.py` puts it
into `ctxext.verify.isolated`. A test that asks for the fixture `real_processes` gets real ones.

Run as a script this is the process that forks: one JSON object per line on stdin (`code`, `words`, `cwd`, `env`), one
on stdout (`returncode`, `stdout`, `stderr`).
"""

import json
import os
import subprocess
import sys
import tempfile
import traceback
from typing import Any

WARM = """
    torch transformers transformers.dynamic_module_utils transformers.generation transformers.modeling_layers
    transformers.models.auto.modeling_auto transformers.models.auto.tokenization_auto
    transformers.models.llama.modeling_llama transformers.integrations.sdpa_attention safetensors.torch
""".split()  # noqa: SIM905
# Read anew by each fork, or by nobody whom it concerns. A process with any other difference is started for real.
FREE = {"HF_MODULES_CACHE", "PYTEST_CURRENT_TEST", "PWD", "OLDPWD", "_", "COLUMNS", "LINES"}


class CleanProcesses:
    """Stands in for `subprocess` where a module uses nothing of it but `run`."""

    CompletedProcess = subprocess.CompletedProcess

    def __init__(self) -> None:
        self.process: subprocess.Popen[str] | None = None
        self.environment: dict[str, str] = {}

    def run(self, command: list[str], **options: Any) -> "subprocess.CompletedProcess[str]":
        """What `subprocess.run` gives of `python -c`; anything else is run by it."""
        if set(options) - {"capture_output", "text", "cwd", "env", "check"} or command[:2] != [sys.executable, "-c"]:
            return subprocess.run(command, **options)
        given = {name: value for name, value in options["env"].items() if name not in FREE}
        if self.process is None:
            self.environment = given
            piped = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            self.process = subprocess.Popen([sys.executable, __file__], env=given, cwd="/", **piped)
        if given != self.environment:
            return subprocess.run(command, **options)
        asked = {"code": command[2], "words": command[3:], "cwd": str(options["cwd"]), "env": dict(options["env"])}
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline())
        return subprocess.CompletedProcess(command, answer["returncode"], answer["stdout"], answer["stderr"])

    def end(self) -> None:
        """Let it go."""
        if self.process is not None:
            self.process.stdin.close()
            self.process.wait()
            self.process = None


def execute(asked: dict[str, Any]) -> int:
    """In the fork: what Python does with `-c`."""
    os.chdir(asked["cwd"])
    os.environ.clear()
    os.environ.update(asked["env"])
    for name in ("transformers.utils.hub", "transformers.utils", "transformers.dynamic_module_utils"):
        sys.modules[name].HF_MODULES_CACHE = asked["env"]["HF_MODULES_CACHE"]
    sys.argv, sys.path[0] = ["-c", *asked["words"]], ""
    try:
        exec(compile(asked["code"], "<string>", "exec"), {"__name__": "__main__"})
    except SystemExit as stop:
        if isinstance(stop.code, str):
            sys.stderr.write(f"{stop.code}\n")
        return stop.code if isinstance(stop.code, int) else int(bool(stop.code))
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def answer(asked: dict[str, Any]) -> dict[str, Any]:
    """Run it in a fork."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        child = os.fork()
        if not child:
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(output.fileno(), 1)
            os.dup2(errors.fileno(), 2)
            code = 1
            try:
                code = execute(asked)
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        for file in (output, errors):
            file.seek(0)
        return {"returncode": code, "stdout": output.read().decode(), "stderr": errors.read().decode()}


if __name__ == "__main__":
    ANSWERS = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.path[0] = ""
    for module in WARM:
        __import__(module)
    assert not any(name.split(".")[0] == "ctxext" for name in sys.modules)
    for line in sys.stdin:
        ANSWERS.write(json.dumps(answer(json.loads(line))) + "\n")
        ANSWERS.flush()
