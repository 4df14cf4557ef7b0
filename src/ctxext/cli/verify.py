"""`ctxext verify`: check a converted checkpoint against its record."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ctxext.checkpoint.opening import Checkpoint, open_checkpoint
from ctxext.cli.options import takes_options
from ctxext.cli.output import Output
from ctxext.errors import CtxextError
from ctxext.files.content import report_stage
from ctxext.gguf import is_gguf
from ctxext.options import HubOptions
from ctxext.recipes.encodings.base import provenance
from ctxext.server.client import ServerOptions

if TYPE_CHECKING:
    from ctxext.served.every_token import EngineComparison

_MARKS = {"passed": ("✓", "green"), "failed": ("✗", "red"), "not checked": ("-", "yellow")}


@takes_options(without=("verbose", "num_concurrent", "max_retries"))
def verify(
    folder: Annotated[str, typer.Argument(metavar="OUT", help="A converted checkpoint: a folder or a Hub id.")],
    *,
    against: Annotated[
        str | None,
        typer.Option("--against", metavar="SOURCE", help="Also compare weights and config.json with this one."),
    ] = None,
    load: Annotated[
        bool, typer.Option("--load/--no-load", help="Also load the model, in a process that cannot import ctxext.")
    ] = True,
    trust_remote_code: Annotated[
        bool,
        typer.Option(
            "--trust-remote-code",
            help="Also run modeling code from another source. For Hub checkpoints this requires --revision COMMIT.",
        ),
    ] = False,
    engine: Annotated[
        str | None,
        typer.Option(
            "--engine",
            metavar="vllm",
            help="Also compare the log-probabilities of vLLM and transformers. With --against, also those of SOURCE "
            "with --hf-overrides.",
        ),
    ] = None,
    engine_args: Annotated[
        str | None,
        typer.Option("--engine-args", metavar="JSON", help="Arguments of vllm.LLM. max_model_len shortens prompts."),
    ] = None,
    server: ServerOptions,
    minutes: Annotated[
        float | None,
        typer.Option(
            "--minutes",
            help="Time limit, not counting the server's time; long prompts that would exceed it are omitted. "
            "Default: 3.",
            min=0,
            rich_help_panel="Server",
        ),
    ] = None,
    hub: HubOptions,
    output: Output,
) -> None:
    """Verify the files, configuration, code, frequencies and weights of a converted checkpoint.

    Prints one line per check. The exit code is 1 if any check fails. With --server, it checks only how a running server
    reads the checkpoint.

    Examples:
    ctxext verify demo-yarn-2k

    ctxext verify user/model --against the-source/model

    ctxext verify demo-yarn-2k --engine vllm

    ctxext verify demo-yarn-2k --server http://127.0.0.1:8000/v1
    """
    if server.server is not None:
        from ctxext.cli.verify_server import verify_server

        _refuse({"--engine": engine, "--engine-args": engine_args, "--against": against, "--no-load": not load})
        if is_gguf(folder):
            raise CtxextError(
                "--server does not support GGUF files.", hint="Give the checkpoint that it was made from."
            )
        checkpoint = open_checkpoint(folder, **vars(hub))
        verify_server(
            checkpoint, server, 3 if minutes is None else minutes, output, trust_remote_code=trust_remote_code
        )
        return
    if minutes is not None:
        raise CtxextError("--minutes requires a server.", hint="Add --server URL.")
    from ctxext.verify.run import failures
    from ctxext.verify.run import verify as run

    if is_gguf(folder):
        from ctxext.cli.gguf import verify_file

        if engine:
            raise CtxextError("--engine does not support GGUF files.", hint="Remove --engine.")
        verify_file(folder, against, output)
        return
    arguments = _arguments(engine, engine_args, trust_remote_code=trust_remote_code)
    rows: list[EngineComparison] = []
    with output.progress("verifying", stopped="") as progress:
        findings = run(
            folder,
            against=against,
            load=load,
            trust_remote_code=trust_remote_code,
            progress=progress,
            **vars(hub),
        )
        failed = bool(failures(findings))
        if engine and not failed:
            report_stage(progress, "comparing with vLLM")
            rows = _in_engine(
                open_checkpoint(folder, **vars(hub)),
                None if against is None else open_checkpoint(against, token=hub.token),
                trust_remote_code=trust_remote_code,
                arguments=arguments,
            )
            failed = not all(row.is_alike for row in rows)
    lines = []
    for finding in findings:
        mark, colour = _MARKS[finding.status]
        lines.append(Text.assemble((mark, colour), f"  {finding.check:<15}", finding.detail))
    content = {"passed": not failed, "checks": [vars(finding) for finding in findings]}
    output.result({**content, **({"engine": [vars(row) for row in rows]} if engine else {})}, *lines, *_table(rows))
    if failed:
        raise typer.Exit(1)


def _refuse(options: Mapping[str, object]) -> None:
    """Raise if an option is set that has no effect on the check of a server."""
    for flag, value in options.items():
        if value:
            raise CtxextError(f"{flag} cannot be combined with --server.", hint="Run both checks one after the other.")


def _arguments(engine: str | None, text: str | None, *, trust_remote_code: bool) -> dict[str, Any]:
    from ctxext.engines.arguments import check_arguments
    from ctxext.engines.vllm import vllm_version
    from ctxext.files.strict import parse_json

    if engine not in (None, "vllm"):
        raise CtxextError(f'Unknown engine "{engine}".', hint="Choose --engine vllm.")
    if engine:
        vllm_version()
    arguments = parse_json(text, "--engine-args") if text else {}
    if not isinstance(arguments, dict):
        raise CtxextError("--engine-args is not a JSON object.", hint="""Write '{"max_model_len": 4096}'.""")
    check_arguments("vllm", arguments, trust_remote_code=trust_remote_code)
    return arguments


def _in_engine(
    out: Checkpoint, source: Checkpoint | None, *, trust_remote_code: bool, arguments: Mapping[str, Any]
) -> "list[EngineComparison]":
    """Compare the checkpoint in vLLM with transformers, and its source with --hf-overrides if they suffice."""
    from ctxext.converters.engine_support import overrides
    from ctxext.recipes.model_config import model_config
    from ctxext.served.every_token import compare_in_engine

    model = model_config(out.config)
    served: dict[str, tuple[Path, Mapping[str, Any]]] = {"OUT": (out.folder, {})}
    if source is not None and not model.code and not provenance(out.config).get("finetune"):
        served["SOURCE with --hf-overrides"] = (source.folder, {"hf_overrides": overrides(model)})
    return compare_in_engine(out, served, trust_remote_code=trust_remote_code, arguments=arguments)


def _table(rows: "Sequence[EngineComparison]") -> list[RenderableType]:
    if not rows:
        return []
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("", "in vLLM", "tokens", "original length", "largest", "at", "mean"):
        table.add_column(heading, justify="left" if heading in ("", "in vLLM", "original length") else "right")
    for row in rows:
        mark, colour = _MARKS["passed" if row.is_alike else "failed"]
        numbers = (f"{row.difference:.1e}", str(row.position), f"{row.mean:.1e}")
        table.add_row(Text(mark, colour), row.served, str(row.tokens), row.place, *numbers)
    return [Text("\ndifferences of log-probabilities from transformers, float32, in nats"), table]
