"""`ctxext verify`: prove that a checkpoint is what it says."""

from typing import Annotated

import typer
from rich.text import Text

from ctxext.cli.options import JsonOption, QuietOption, RevisionOption, TokenOption
from ctxext.cli.output import Output

_MARKS = {"passed": ("✓", "green"), "failed": ("✗", "red"), "not checked": ("-", "yellow")}


def verify(
    folder: Annotated[str, typer.Argument(metavar="OUT", help="A converted checkpoint: a folder or a Hub id.")],
    *,
    against: Annotated[
        str | None,
        typer.Option("--against", metavar="SOURCE", help="Also compare the weights with those of this checkpoint."),
    ] = None,
    load: Annotated[
        bool, typer.Option("--load/--no-load", help="Also load the model, in a process that cannot import ctxext.")
    ] = True,
    trust_remote_code: Annotated[
        bool,
        typer.Option(
            "--trust-remote-code",
            help="Also run modeling code that is not this version's own; from the Hub with --revision COMMIT only.",
        ),
    ] = False,
    revision: RevisionOption = None,
    token: TokenOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Check that a converted checkpoint is what it says: files, configuration, code, frequencies, weights.

    One line per check; the exit code is 1 if any of them fails.

    Examples:
    ctxext verify demo-yarn-2k

    ctxext verify user/model --against the-source/model
    """
    from ctxext.verify.run import failures
    from ctxext.verify.run import verify as run

    output = Output(as_json=as_json, quiet=quiet)
    with output.progress("reading") as progress:
        findings = run(
            folder,
            against=against,
            load=load,
            trust_remote_code=trust_remote_code,
            revision=revision,
            token=token,
            progress=progress,
        )
    lines = []
    for finding in findings:
        mark, colour = _MARKS[finding.status]
        lines.append(Text.assemble((mark, colour), f"  {finding.check:<15}", finding.detail))
    failed = failures(findings)
    output.result({"passed": not failed, "checks": [vars(finding) for finding in findings]}, *lines)
    if failed:
        raise typer.Exit(1)
