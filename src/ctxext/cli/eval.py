"""`ctxext eval`: does a model use its context, and what does extending it cost?"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ctxext.cli.interrupts import same_command
from ctxext.cli.options import (
    DeviceOption,
    DtypeOption,
    JsonOption,
    QuietOption,
    RevisionOption,
    TokenOption,
    VerboseOption,
    built,
    names_in,
    parameters_of,
    with_parameters,
)
from ctxext.cli.output import Output
from ctxext.errors import CtxextError
from ctxext.evaluate.settings import Settings
from ctxext.files.extras import install_command, is_installed
from ctxext.files.length import format_length
from ctxext.files.output_directory import explain_disk_errors
from ctxext.gguf import is_gguf

if TYPE_CHECKING:
    from ctxext.evaluate.report.report import Report


_RUN, _RESULTS = "How it is run", "Results"

WRITTEN_TASKS = ("needle",)
"""The default tasks of engines, which only generate answers."""
ModelsArgument = Annotated[list[str], typer.Argument(metavar="MODEL…", help="Folders, Hub ids, demo, or GGUF files.")]
ChatTemplateOption = Annotated[
    bool, typer.Option("--chat-template/--no-chat-template", help="Use it where there is one.", rich_help_panel=_RUN)
]
EngineOption = Annotated[
    str,
    typer.Option(
        "--engine",
        help="transformers; for retrieval tasks vllm, of checkpoints that it serves, or llama.cpp, of GGUF files.",
        rich_help_panel=_RUN,
    ),
]
EngineArgumentsOption = Annotated[
    str | None,
    typer.Option(
        "--engine-args",
        metavar="JSON",
        help="""More of vllm.LLM, '{"tensor_parallel_size": 2}', or of llama.cpp, '{"n_gpu_layers": 0}'.""",
        rich_help_panel=_RUN,
    ),
]
AttentionOption = Annotated[
    str | None, typer.Option("--attn", help="sdpa, eager, flash_attention_2 and so on.", rich_help_panel=_RUN)
]
TrustOption = Annotated[
    bool,
    typer.Option("--trust-remote-code", help="Run code that a checkpoint brings along.", rich_help_panel=_RUN),
]
OutOption = Annotated[
    Path | None,
    typer.Option(
        "--out",
        "-o",
        help="Folder for the report. Default: report, report-2 …",
        show_default=False,
        rich_help_panel=_RESULTS,
    ),
]
ResumeOption = Annotated[bool, typer.Option("--resume", help="Go on with what is in OUT.", rich_help_panel=_RESULTS)]
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Replace what is in OUT.", rich_help_panel=_RESULTS)]


@with_parameters(parameters_of(Settings), after="models")
def eval_(
    models: ModelsArgument,
    *,
    chat_template: ChatTemplateOption = True,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    attention: AttentionOption = None,
    trust_remote_code: TrustOption = False,
    engine: EngineOption = "transformers",
    engine_args: EngineArgumentsOption = None,
    out: OutOption = None,
    resume: ResumeOption = False,
    overwrite: OverwriteOption = False,
    revision: RevisionOption = None,
    token: TokenOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
    **options: Any,
) -> None:
    """Measure whether models find things anywhere in their context, and what extending it cost.

    Examples:
    ctxext eval demo demo-yarn-2k --task needle,short --lengths 512,2k --allow-beyond

    ctxext eval my-model --task needle,kv --lengths 4k,32k --depths 11 --out report --resume

    ctxext eval my-model --task ruler,graphwalks,mrcr --lengths 4k,32k --samples 100 --depths 1

    ctxext eval my-model --engine vllm --task needle,kv --lengths 4k,32k

    ctxext eval longer.gguf --engine llama.cpp --task needle,kv --lengths 4k,32k
    """
    from ctxext.evaluate.model import Loading
    from ctxext.evaluate.plan import default_tasks
    from ctxext.evaluate.run import evaluate
    from ctxext.files.strict import parse_json

    output = Output(as_json=as_json, quiet=quiet, verbose=verbose)
    arguments = parse_json(engine_args, "--engine-args") if engine_args else {}
    if not isinstance(arguments, dict):
        raise CtxextError("--engine-args is no JSON object.", hint="""Write '{"tensor_parallel_size": 2}'.""")
    loading = Loading(device, dtype, attention, chat_template, trust_remote_code, revision, token, engine, arguments)
    usual = WRITTEN_TASKS if engine != "transformers" else ()
    tasks = names_in(options["tasks"]) or usual or default_tasks(models, loading)
    settings = built(Settings, options, tasks=tasks)
    out = out or free_folder(resume=resume)
    with resumable(out, output), output.progress("evaluating") as progress:
        report = evaluate(
            models, settings, loading=loading, out=out, resume=resume, overwrite=overwrite, progress=progress
        )
    if report:
        _print_report(report, out, models, output)


@contextmanager
def resumable(out: Path, output: Output) -> Iterator[None]:
    """Explain a full disk in one line, and after Ctrl-C say how to go on."""
    try:
        with explain_disk_errors(out):
            yield
    except KeyboardInterrupt:
        if out.exists():
            named = () if {"-o", "--out"} & {word.partition("=")[0] for word in sys.argv} else ("--out", str(out))
            words = [word for word in same_command(*named, "--resume") if word != "--overwrite"]
            output.next_step(*words, why="Stopped; go on with")
        raise


def free_folder(*, resume: bool) -> Path:
    """A folder that does not exist yet."""
    from ctxext.files.processes import num_processes

    if resume or num_processes() > 1:
        raise CtxextError("Which results are meant?", hint="Name their folder with --out.")
    number, folder = 1, Path("report")
    while folder.exists():
        number += 1
        folder = Path(f"report-{number}")
    return folder


def _print_report(report: "Report", out: Path, models: Sequence[str], output: Output) -> None:
    """Print warnings, the tables, findings, and the next step."""
    from rich.text import Text

    from ctxext.cli.eval_tables import report_tables
    from ctxext.evaluate.report.findings import findings

    if report.get("skipped_lines"):
        output.warning(f"{report['skipped_lines']} lines of {out} are incomplete or of another run, and left out.")
    for model in report["models"]:
        if model.get("mind"):
            output.warning(f"{model['name']} in {model['engine']}: {model['mind']}.")
    sentences = [Text(sentence) for sentence in findings(report)]
    output.result(report, *report_tables(report, output.stdout.width), Text(), *sentences)
    computed = {f"{model.get('dtype')} on {model.get('device')}" for model in report["models"] if model.get("dtype")}
    output.note(Text(f"Computed in {', '.join(sorted(computed))}. Pictures and tables: {out / 'report.html'}"))
    if not is_installed("matplotlib"):
        output.note(f"No picture files: {install_command('matplotlib')}, then the same command with --resume.")
    each = list(zip(models, report["models"], strict=False))  # Sources read beside them come last.
    if tuned := [path for path, model in each if model["is_finetuned"]]:
        output.next_step("ctxext", "push", tuned[0], f"USER/{Path(tuned[0]).name}", "--report", out, why="Publish it")
    elif not (extended := [pair for pair in each if pair[1]["recipe"]]):
        _propose(report, models[0], output)
    elif is_gguf(path := extended[0][0]):
        output.next_step("llama-server", "-m", path, "-c", extended[0][1]["context_length"], why="Run it")
    else:
        output.next_step(
            "ctxext", "finetune", path, "OUT", "--data", "TEXTS.jsonl", why="A short fine-tune helps most methods"
        )


def _propose(report: "Report", source: str, output: Output) -> None:
    """The next step for a model as it is: the rest of its context, then which method takes it beyond."""
    model = report["models"][0]
    asked, reach = max(model["lengths"], default=0), model["context_length"] or 0
    if model["kind"] != "causal" or is_gguf(source):
        method = "yarn" if model["kind"] == "causal" else "table"
        output.next_step("ctxext", "convert", source, "--method", method, "--factor", 4, why="Extend it")
    elif asked < reach:
        tasks = ",".join(report["settings"]["tasks"])
        words = ("--task", tasks, "--lengths", format_length(reach))
        output.next_step("ctxext", "eval", source, *words, why="Ask at the end of its context")
    else:
        target = format_length(max(asked, 2 * reach))
        output.next_step("ctxext", "compare", source, "--target-length", target, why="See which method reaches further")
