"""`ctxext verify --server`: check how a running server reads a checkpoint."""

import dataclasses
from collections.abc import Sequence

import typer
from rich.table import Table
from rich.text import Text

from ctxext.checkpoint.opening import Checkpoint
from ctxext.cli.output import Output, mark_line
from ctxext.served.verdict import FAULT, SERVED, UNDECIDED, ServerReport
from ctxext.server.client import ServerOptions

_MARKS = {SERVED: ("✓", "green"), FAULT: ("✗", "red"), UNDECIDED: ("-", "yellow")}


def verify_server(
    checkpoint: Checkpoint, options: ServerOptions, minutes: float, output: Output, *, trust_remote_code: bool
) -> None:
    """Print how a server reads a checkpoint; the exit code is 1 if that is a fault."""
    # A server that does not answer is noticed before torch is imported, which takes seconds.
    connection = options.connection
    connection.complete([1], "One", max_tokens=1)
    from ctxext.served.check import check_server

    with output.progress("verifying", stopped="") as progress:
        report = check_server(
            checkpoint,
            connection,
            trust_remote_code=trust_remote_code,
            minutes=minutes,
            progress=progress,
        )
    mark, colour = _MARKS[report.status]
    served = f" ({report.model})" if report.model else ""
    lines = [mark_line(mark, colour, f"{report.server}{served}: {report.verdict}"), Text(), *_table(report)]
    lines += [Text(note) for note in report.notes]
    if report.fix:
        lines.append(Text(f"Fix: {report.fix}"))
    output.result({"passed": report.status != FAULT, **dataclasses.asdict(report)}, *lines)
    if report.status == FAULT:
        raise typer.Exit(1)


def _table(report: ServerReport) -> Sequence[Text | Table]:
    """Return the differences from each reading by prompt, under their heading."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("")
    for probe in report.probes:
        table.add_column(f"{probe['place']}\n{probe['tokens']:,} tokens", justify="right")
    for name in dict.fromkeys(name for probe in report.probes for name in probe["differences"]):
        numbers = [probe["differences"].get(name) for probe in report.probes]
        table.add_row(name, *("" if number is None else f"{number:.2g}" for number in numbers))
    states = ["refused" if probe["refused"] else "no token" if probe["silent"] else "" for probe in report.probes]
    if any(states):
        table.add_row("", *states)
    tokens = (
        "log-probabilities" if report.basis == "log-probabilities" else "the generated and the most probable tokens"
    )
    return [Text(f"mean differences of {tokens} in nats, server and transformers (float32)"), table]
