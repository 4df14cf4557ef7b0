"""Run a script in a process that cannot import ctxext, as if it were not installed."""

import logging
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

_LOG = logging.getLogger(__name__)

SETTINGS = {"HF_HUB_OFFLINE": "1", "USE_HUB_KERNELS": "NO", "TRANSFORMERS_VERBOSITY": "error"}
"""Additional environment variables of the process: no network, no kernels from the Hub, no warnings."""

_BEGINNING = """
import gc, runpy, socket, sys, types

gc.set_threshold(10_000)  # The usual 700 takes a fifth of the time of importing torch and transformers.

def look_up(host, *_, **__):
    raise OSError(f"{{host}} must not be needed here")

socket.getaddrinfo = look_up

class NoCtxext:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "ctxext":
            raise ImportError("ctxext must not be needed here")

sys.meta_path.insert(0, NoCtxext())
package = sys.modules["isolated"] = types.ModuleType("isolated")
package.__path__ = [{folder!r}]
runpy.run_path({script!r}, run_name="isolated.__main__")
"""


def run_isolated(
    script: Path, *words: str, environment: Mapping[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    """Run a script in an empty folder, with its own module cache and without the network.

    Args:
        script: A script that uses the standard library, torch, transformers, and relative imports from its folder.
        words: The command-line arguments; paths must be absolute.
        environment: Additional environment variables.
    """
    _LOG.debug("running %s %s in a clean process", script, words)
    with tempfile.TemporaryDirectory() as place:
        return subprocess.run(
            [sys.executable, "-c", _BEGINNING.format(script=str(script), folder=str(script.parent)), *words],
            capture_output=True,
            input="",  # transformers prompts on the terminal before it runs third-party code.
            text=True,
            cwd=place,
            env={**os.environ, **SETTINGS, **(environment or {}), "HF_MODULES_CACHE": place},
            check=False,
        )


def last_line_of_errors(result: "subprocess.CompletedProcess[str]") -> str:
    """Return the last line of a failed script's errors."""
    return (result.stderr.strip().splitlines() or ["no message"])[-1]


def fault_within(result: "subprocess.CompletedProcess[str]", files: Iterable[str | Path]) -> tuple[str, str] | None:
    """Return the file among `files` in which a script failed, and its error; None if it failed elsewhere.

    Args:
        result: The result of `run_isolated`; its errors contain the traceback.
        files: The possible files, by the paths that the script used.
    """
    shown = {str(file) for file in files}
    places: list[tuple[str, str]] = re.findall(r'^ *File "(.+)", line (\d+)', result.stderr, re.MULTILINE)
    inside = [(file, line) for file, line in places if file in shown]
    if not inside:
        return None
    file, line = inside[-1]
    return file, f"{last_line_of_errors(result)} ({Path(file).name}, line {line})"
