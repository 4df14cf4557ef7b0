"""`--num-processes`: start a command in several processes, which share its work (`evaluate/processes.py`)."""

import logging
import os
import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import typer

from ctxext.cli.output import Output, resuming_command
from ctxext.errors import CtxextError
from ctxext.evaluate.processes import is_first_error
from ctxext.files.output_directory import explain_disk_errors
from ctxext.files.processes import num_processes, rank
from ctxext.options import check_options, option


@dataclass(frozen=True)
class Launch:
    """Processes to start."""

    num_processes: int = option(
        1,
        help="Processes that share the work, each on its own GPU, or with some threads of the CPU.",
        panel="Execution",
        min=1,
        max=256,
    )

    def __post_init__(self) -> None:
        check_options(self)

    def start(self, out: Path) -> None:
        """Run this command in several processes if requested, as torchrun does, and exit with their exit code."""
        if self.num_processes in (1, num_processes()):
            return
        if num_processes() > 1:
            raise CtxextError(
                f"--num-processes {self.num_processes} differs from the {num_processes()} processes of the launcher.",
                hint="Omit --num-processes.",
            )
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # A lost connection is one line.
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // self.num_processes)))
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=self.num_processes,
            logs_specs=DefaultLogsSpecs(os.devnull),
            run_id="ctxext",
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
        )
        logging.disable(logging.ERROR)  # The processes report their errors themselves.
        # In a word, torch replaces ${local_rank}.
        words = [word.replace("$", "$$") for word in ("-P", "-m", "ctxext", *sys.argv[1:], *_place(out))]
        try:
            elastic_launch(config, sys.executable)(*words)
        except SignalException as error:
            raise typer.Exit(128 + error.sigval) from None
        except ChildFailedError as error:
            number, failure = error.get_first_failure()
            if failure.exitcode > 0:
                raise typer.Exit(failure.exitcode) from None
            name = signal.Signals(-failure.exitcode).name
            raise CtxextError(
                f"Process {number + 1} of {self.num_processes} was killed by {name}, so the others were stopped.",
                hint=f"Finished results are kept. Resume with: {shlex.join(resuming_command(*_place(out)))}",
            ) from None
        raise typer.Exit


@contextmanager
def resumable(out: Path, output: Output) -> Iterator[None]:
    """Explain a full disk in one line, and print the command that resumes after Ctrl-C; one of several processes does.

    Of several processes, only the first one shows progress.
    """
    output.quiet = output.quiet or rank() != 0
    try:
        with explain_disk_errors(out):
            yield
    except KeyboardInterrupt:
        if out.exists():
            output.next_step(*resuming_command(*_place(out)), why="Stopped. Resume with")
        raise
    except Exception:
        if not is_first_error():
            raise typer.Exit(1) from None
        raise


def _place(out: Path) -> tuple[str, ...]:
    """Return the option for the folder; empty if the command contains it."""
    return () if {"-o", "--out"} & {word.partition("=")[0] for word in sys.argv} else ("--out", str(out))
