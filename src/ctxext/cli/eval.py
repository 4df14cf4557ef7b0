"""`ctxext eval`: measure retrieval at every depth of the context, and the quality lost at short lengths."""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ctxext.cli.options import takes_options
from ctxext.cli.output import Output, same_command
from ctxext.cli.processes import Launch, resumable
from ctxext.errors import CtxextError
from ctxext.files.length import format_length
from ctxext.files.packages import install_command, is_installed
from ctxext.files.processes import num_processes
from ctxext.gguf import is_gguf
from ctxext.models.loading import Loading
from ctxext.options import option
from ctxext.server.client import ServerOptions
from ctxext.tasks.settings import Settings

if TYPE_CHECKING:
    from ctxext.report.report import Report

_RESULTS = "Results"
ModelsArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="MODEL…",
        help="Folders, Hub ids, demo, or GGUF files. Optional with --server.",
        show_default=False,
    ),
]


@dataclass(frozen=True)
class ReportPlace:
    """Folder of a report, and whether to resume or overwrite it."""

    out: Path | None = option(
        None, help="Folder for the report. Default: report, report-2 …", flags=("--out", "-o"), panel=_RESULTS
    )
    resume: bool = option(False, help="Continue with the results in OUT.", panel=_RESULTS)
    overwrite: bool = option(False, help="Replace the results in OUT.", panel=_RESULTS)

    def folder(self) -> Path:
        """Return the named folder, or the first default one that does not exist."""
        if self.out is not None:
            return self.out
        if self.resume or num_processes() > 1:
            raise CtxextError("Missing option --out.", hint="Specify the folder of the results with --out.")
        names = itertools.chain(["report"], (f"report-{number}" for number in itertools.count(2)))
        return next(folder for folder in map(Path, names) if not folder.exists())


@takes_options()
def eval_(
    models: ModelsArgument = (),  # type: ignore[assignment]
    *,
    settings: Settings,
    loading: Loading,
    server: ServerOptions,
    place: ReportPlace,
    minutes: Annotated[
        float | None,
        typer.Option(
            "--minutes",
            help="Time limit in minutes; all models stay loaded.",
            metavar="N",
            rich_help_panel="Execution",
        ),
    ] = None,
    launch: Launch,
    output: Output,
) -> None:
    """Measure retrieval at every depth of the context, and the quality lost at short lengths.

    Examples:
    ctxext eval demo demo-yarn-2k --task needle,short --lengths 512,2k --allow-beyond

    ctxext eval my-model --task needle,kv --lengths 4k,32k --depths 11 --out report --resume

    ctxext eval my-model --task ruler,graphwalks,mrcr --lengths 4k,32k --samples 100 --depths 1

    ctxext eval my-model --engine vllm --task needle,kv --lengths 4k,32k

    ctxext eval longer.gguf --engine llama.cpp --task needle,kv --lengths 4k,32k

    ctxext eval my-model --server http://127.0.0.1:8000/v1 --task needle,kv --lengths 4k,32k

    ctxext eval my-model my-model-yarn --task ruler --lengths 32k --num-processes 8
    """
    from ctxext.evaluate.run import evaluate

    loading = loading if server.server is None else dataclasses.replace(loading, server=server)
    if loading.engine != "transformers" and launch.num_processes > 1:
        flag = "--engine" if loading.server is None else "--server"
        raise CtxextError(f"--num-processes cannot be combined with {flag}.", hint="Omit --num-processes.")
    if not models and loading.server is None:
        raise CtxextError("Missing argument MODEL.", hint="Name a folder, a Hub id or demo: ctxext eval demo.")
    out = place.folder()
    launch.start(out)
    with resumable(out, output), output.progress("evaluating") as progress:
        report = evaluate(
            models,
            settings,
            loading=loading,
            out=out,
            resume=place.resume,
            overwrite=place.overwrite,
            minutes=minutes,
            progress=progress,
        )
    if report:
        _print_report(report, out, models, output)


def list_open_thoughts(models: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, str | None]]:
    """Yield the name of each model of a report with scored thoughts, and their mark; in chat they are not scored."""
    for model in models:
        if any(cell["task"] not in model.get("forms", ()) for cell in model["cells"]):
            yield model["name"], model.get("open_thought")


def warn_of_thoughts(models: Iterable[tuple[str, str | None]], output: Output) -> None:
    """Warn of models with prompts that end within a thought."""
    for name, mark in models:
        if mark:
            output.warning(
                f'The prompts of {name} end within "{mark}", so thoughts are scored as answers. '
                "Use --prompt chat, in which only the answer is scored, or --no-chat-template."
            )


def _print_report(report: "Report", out: Path, models: Sequence[str], output: Output) -> None:
    """Print warnings, the tables, findings, and the next step."""
    from rich.text import Text

    from ctxext.cli.eval_tables import report_tables
    from ctxext.report.findings import findings
    from ctxext.report.forms import describe_cut, describe_thoughts, suggest_room

    if report.get("skipped_lines"):
        output.warning(f"Skipped {report['skipped_lines']} lines of {out} that are incomplete or from another run.")
    warn_of_thoughts(list_open_thoughts(report["models"]), output)
    for model in report["models"]:
        if describe_cut(model):
            output.warning(f"{model['name']} needs more tokens for answers: {suggest_room(model)}.")
        if describe_thoughts(model):
            output.warning(f"--no-think has no effect on {model['name']}: it has no switch for thoughts that is known.")
    for model in report["models"]:
        if model.get("mind"):
            output.warning(f"{model['name']} in {model['engine']}: {model['mind']}.")
    if missed := report.get("num_missed"):
        output.warning(f"The time was not enough for {missed} prompts and documents. --resume continues.")
    sentences = [Text(sentence) for sentence in findings(report)]
    output.result(report, *report_tables(report, output.stdout.width), Text(), *sentences)
    computed = {f"in {model.get('dtype')} on {model.get('device')}" for model in report["models"] if model.get("dtype")}
    computed |= {f"by {model['engine']}" for model in report["models"] if "served_model" in model}
    output.note(Text(f"Computed {', '.join(sorted(computed))}. Report: {out / 'report.html'}"))
    if not is_installed("matplotlib"):
        output.note(f"For image files, run {install_command('matplotlib')}, then the same command with --resume.")
    each = list(zip(models, report["models"], strict=False))  # Sources that were added for comparison come last.
    if tuned := [path for path, model in each if model["is_finetuned"]]:
        output.next_step("ctxext", "push", tuned[0], f"USER/{Path(tuned[0]).name}", "--report", out, why="Publish it")
    elif not (extended := [pair for pair in each if pair[1]["recipe"]]):
        if models:
            _propose(report, models[0], output)
    elif is_gguf(path := extended[0][0]):
        output.next_step("llama-server", "-m", path, "-c", extended[0][1]["context_length"], why="Run it")
    else:
        options = ("--preset", "read-twice", "--data", "TEXTS.jsonl")
        output.next_step("ctxext", "finetune", path, "OUT", *options, why="Training improves what it finds")


def _propose(report: "Report", source: str, output: Output) -> None:
    """Suggest the next step for an unmodified model: evaluate its whole context, then compare or apply methods."""
    model = report["models"][0]
    longest, context_length = max(model["lengths"], default=0), model["context_length"] or 0
    if model["kind"] != "causal" or is_gguf(source):
        method = "yarn" if model["kind"] == "causal" else "table"
        output.next_step("ctxext", "convert", source, "--method", method, "--factor", 4, why="Extend it")
    elif longest < context_length:
        words = same_command("--lengths", format_length(context_length), without=("--lengths", "--out", "-o"))
        words = [word for word in words if word not in ("--resume", "--overwrite")]
        output.next_step(*words, why="Evaluate the whole context")
    else:
        target = format_length(max(longest, 2 * context_length))
        output.next_step("ctxext", "compare", source, "--target-length", target, why="Compare methods that extend it")
