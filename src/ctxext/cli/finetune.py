"""`ctxext finetune`: a short training that makes a longer context work."""

import dataclasses
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ctxext.cli.config_file import ConfigOption, used_options
from ctxext.cli.finetune_data import DataChoice
from ctxext.cli.finetune_view import same_command, tell_plan, tell_result, with_step_lines
from ctxext.cli.options import (
    JsonOption,
    OverwriteAnythingOption,
    QuietOption,
    RevisionOption,
    SourceArgument,
    TokenOption,
    VerboseOption,
    built,
    names_in,
)
from ctxext.cli.output import Output
from ctxext.finetune.options import TrainingOptions
from ctxext.locks import short_name

if TYPE_CHECKING:
    from ctxext.finetune.dry_run import Plan
    from ctxext.finetune.run import Finetuned

OutArgument = Annotated[Path, typer.Argument(metavar="OUT", help="The folder to make.")]


_DATA = "Data"

DataOption = Annotated[
    list[str] | None,
    typer.Option(
        "--data",
        help="A file or folder of text, JSON, CSV or parquet, or the id of a data set; several with their weights, as "
        "--data books.jsonl:0.7 --data chats.jsonl:0.3. demo makes documents on the fly.",
        show_default=False,
    ),
]
FormatOption = Annotated[
    str,
    typer.Option(
        "--format",
        help="What records are: auto, text, chat, prompt-completion, sharegpt or alpaca.",
        rich_help_panel=_DATA,
    ),
]
TextFieldOption = Annotated[
    str, typer.Option("--text-field", help="The field that holds a text.", rich_help_panel=_DATA)
]
SplitOption = Annotated[
    str, typer.Option("--split", help="The split of a folder or data set that is read.", rich_help_panel=_DATA)
]
SkipBadRowsOption = Annotated[
    bool,
    typer.Option(
        "--skip-bad-rows", help="Count records that cannot be learned from instead of stopping.", rich_help_panel=_DATA
    ),
]
EvalDataOption = Annotated[
    str | None,
    typer.Option(
        "--eval-data",
        help="Data on which the loss is measured while training; of folders and data sets the split that is held out.",
        rich_help_panel=_DATA,
        show_default=False,
    ),
]
LongShareOption = Annotated[
    float | None,
    typer.Option(
        "--long-share",
        help="Share of the tokens that come from documents of at least half the length. Default: as they come.",
        rich_help_panel=_DATA,
        show_default=False,
    ),
]
MergeOption = Annotated[bool, typer.Option("--merge/--no-merge", help="Write a full checkpoint, or the adapter alone.")]
EvalOption = Annotated[
    str | None,
    typer.Option("--eval", help="Tasks to ask before and after, as needle,short.", show_default=False),
]
ResumeOption = Annotated[bool, typer.Option("--resume", help="Go on with a run that was stopped.")]
OverwriteOption = Annotated[
    bool, typer.Option("--overwrite", help="Replace OUT if ctxext made it, and an unfinished run beside it.")
]
DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Read the data, estimate memory and time, and stop before training.")
]


def finetune(
    context: typer.Context,
    model: SourceArgument,
    out: OutArgument,
    *,
    config: ConfigOption = None,
    data: DataOption = None,
    record_format: FormatOption = "auto",
    text_field: TextFieldOption = "text",
    split: SplitOption = "train",
    skip_bad_rows: SkipBadRowsOption = False,
    long_share: LongShareOption = None,
    eval_data: EvalDataOption = None,
    merge: MergeOption = True,
    evaluate: EvalOption = None,
    resume: ResumeOption = False,
    overwrite: OverwriteOption = False,
    overwrite_anything: OverwriteAnythingOption = False,
    dry_run: DryRunOption = False,
    revision: RevisionOption = None,
    token: TokenOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
    **options: Any,
) -> None:
    """Train an extended model on long sequences, with LoRA by default, and write it as a portable checkpoint.

    Examples:
    ctxext finetune my-model-32k my-model-32k-lora --data books.jsonl --length 32k

    accelerate launch -m ctxext finetune my-model-32k out --data books.jsonl --batch-size 16
    """
    from ctxext.finetune import run
    from ctxext.finetune.prepare import is_first

    _check_tasks(evaluate, model, revision, token)
    output = Output(as_json=as_json, quiet=quiet or not is_first(), verbose=verbose)
    training = built(TrainingOptions, options)
    chosen = DataChoice(tuple(data or ()), record_format, text_field, split, skip_bad_rows, long_share)
    held_out = dataclasses.replace(chosen, words=(eval_data,), split=None, long_share=None) if eval_data else None
    if dry_run:
        tell_plan(output, _plan(model, chosen, training, merge=merge, revision=revision, token=token, output=output))
        return
    with output.progress("") as progress:
        try:
            done = run.finetune(
                model,
                out,
                chosen.reader(training),
                training,
                data={**chosen.described(), **({"eval": held_out.described()["name"]} if held_out else {})},
                read_held_out=held_out.reader(training) if held_out else None,
                revision=revision,
                token=token,
                merge=merge,
                resume=resume,
                overwrite=overwrite,
                overwrite_anything=overwrite_anything,
                progress=with_step_lines(output, progress),
                tell=output.note,
            )
        except KeyboardInterrupt:
            output.next_step(*same_command("--resume"), why="Stopped; go on with")
            raise
    if done is None:
        return
    out.with_name(f"{short_name(out.name)}.run.yaml").write_text(
        used_options(context), encoding="utf-8", errors="replace"
    )
    report = _evaluate(model, out, names_in([evaluate]), done, output) if evaluate and merge else None
    tell_result(output, done, model, out, merge=merge, report=report)


def _check_tasks(tasks: str | None, model: str, revision: str | None, token: str | None) -> None:
    """Refuse unknown tasks, and those for another kind of model, before hours of training."""
    if not tasks:
        return
    from ctxext.evaluate.checkpoint_info import open_infos
    from ctxext.evaluate.model import Loading
    from ctxext.evaluate.plan import check_kind
    from ctxext.evaluate.settings import Settings

    settings = Settings(tasks=names_in([tasks]))
    for info in open_infos([model], revision=revision, token=token):
        check_kind(info, settings, Loading())


def _evaluate(model: str, out: Path, tasks: tuple[str, ...], done: "Finetuned", output: Output) -> Any:
    """Ask the base and the result the same questions."""
    from ctxext.cli.eval_tables import report_tables
    from ctxext.evaluate.run import evaluate
    from ctxext.evaluate.settings import Settings

    settings = Settings(tasks=tasks, seed=done.options.seed)
    with output.progress("evaluating") as progress:
        report = evaluate([model, str(out)], settings, out=out / "evaluation", progress=progress)
    for table in report_tables(report, output.stderr.width):
        output.note(table)
    return report


def _plan(model: str, chosen: DataChoice, options: TrainingOptions, *, output: Output, **given: Any) -> "Plan":
    from ctxext.finetune.dry_run import dry_run

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning)  # As while training: transformers' own business.
        return dry_run(model, chosen.reader(options), options, tell=output.note, **given)
