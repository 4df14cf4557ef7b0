"""`--num-processes`: start a command in several processes, which share its work (`evaluate/processes.py`)."""

import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import typer

from ctxext.cli.output import Output, resuming_command
from ctxext.errors import CtxextError
from ctxext.files.output_directory import explain_disk_errors
from ctxext.files.processes import LAUNCHER, num_processes, raise_on_sigterm
from ctxext.options import check_options, option

_MOST = 256
_PAUSE = 0.1
_GRACE = 10.0
"""Seconds to wait for the first process: an invalid model or file ends all of them, and it reports the error."""
_PATIENCE = 2.0
"""Seconds to wait after a signal."""


@dataclass(frozen=True)
class Launch:
    """Processes to start."""

    num_processes: int = option(
        1,
        help="Processes that share the work, each on its own GPU, or with some threads of the CPU.",
        panel="Execution",
        min=1,
        max=_MOST,
        invalid="--num-processes must be a number from 1 to 256, not {value}.",
    )

    def __post_init__(self) -> None:
        check_options(self)

    def start(self, out: Path, output: Output) -> None:
        """Run this command in several processes if requested, and exit as the first one does."""
        if self.num_processes in (1, num_processes()):
            return
        if num_processes() > 1:
            raise CtxextError(
                f"--num-processes {self.num_processes} differs from the {num_processes()} processes of the launcher.",
                hint="Omit --num-processes.",
            )
        with resumable(out, output), raise_on_sigterm(), tempfile.TemporaryDirectory() as folder:
            processes = _start(self.num_processes, out, Path(folder))
            try:
                code = _wait(processes, out, Path(folder))
            finally:
                _end(processes)
        raise typer.Exit(code)


@contextmanager
def resumable(out: Path, output: Output) -> Iterator[None]:
    """Explain a full disk in one line; after Ctrl-C, print the command that resumes."""
    try:
        with explain_disk_errors(out):
            yield
    except KeyboardInterrupt:
        if out.exists() and LAUNCHER not in os.environ:
            output.next_step(*resuming_command(*_place(out)), why="Stopped. Resume with")
        raise


def _place(out: Path) -> tuple[str, ...]:
    """Return the option for the folder; empty if the command contains it."""
    return () if {"-o", "--out"} & {word.partition("=")[0] for word in sys.argv} else ("--out", str(out))


def _start(count: int, out: Path, folder: Path) -> "list[subprocess.Popen[bytes]]":
    """Start all processes. The first one prints; the others write their errors as JSON to files in the folder."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count)}
    shared |= {"LOCAL_WORLD_SIZE": str(count), LAUNCHER: str(os.getpid())}
    settings = {"OMP_NUM_THREADS": str(max(1, cores // count)), **os.environ, **shared}
    words = [sys.executable, "-P", "-m", "ctxext", *sys.argv[1:], *_place(out)]
    processes = [subprocess.Popen(words, env={**settings, "RANK": "0", "LOCAL_RANK": "0"})]
    null = subprocess.DEVNULL
    for rank in map(str, range(1, count)):
        environment = {**settings, "RANK": rank, "LOCAL_RANK": rank}
        with (folder / rank).open("wb") as file:
            processes.append(
                subprocess.Popen([*words, "--json"], env=environment, stdin=null, stdout=file, stderr=null)
            )
    return processes


def _wait(processes: "Sequence[subprocess.Popen[bytes]]", out: Path, folder: Path) -> int:
    """Wait for the first process and return its exit code; raise if a signal or another process ends the run."""
    first, *_ = processes
    try:
        while first.poll() is None and not any(process.poll() for process in processes):
            time.sleep(_PAUSE)
        if any((process.returncode or 0) > 0 for process in processes):
            with contextlib.suppress(subprocess.TimeoutExpired):
                first.wait(_GRACE)
    except KeyboardInterrupt:  # The terminal interrupts all processes, but `kill` only this one.
        with contextlib.suppress(subprocess.TimeoutExpired):
            first.wait(_PATIENCE)
        first.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            first.wait(_PATIENCE)
        raise
    if (code := first.returncode) is not None and code >= 0:
        return code
    rank, code = next((rank, process.returncode) for rank, process in enumerate(processes) if process.returncode)
    if code > 0:
        with contextlib.suppress(ValueError, LookupError):
            error = json.loads((folder / str(rank)).read_text(encoding="utf-8"))["error"]
            raise CtxextError(error["message"], hint=error["hint"])
    end = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    raise CtxextError(
        f"Process {rank + 1} of {len(processes)} {end}, so the others were stopped.",
        hint=f"Finished results are kept. Resume with: {shlex.join(resuming_command(*_place(out)))}",
    )


def _end(processes: "Sequence[subprocess.Popen[bytes]]") -> None:
    """End all processes; those that have finished their work get time for it, as the first one waited for them."""
    is_complete = processes[0].returncode == 0
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE if is_complete else 0)
        process.terminate()
    for process in processes:
        try:
            process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
