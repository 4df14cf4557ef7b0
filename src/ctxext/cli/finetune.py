"""`ctxext finetune`: fine-tune a model on long sequences."""

import dataclasses
import shlex
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ctxext.cli.option_files import ConfigOption, PresetOption, SchemaOption, WithoutOption, used_options
from ctxext.cli.options import SourceArgument, complete_trainer, takes_options
from ctxext.cli.output import Output, done_line, same_command
from ctxext.converters.card import ANY_ID
from ctxext.errors import CtxextError, suggest
from ctxext.files.content import Progress
from ctxext.files.output_directory import short_name
from ctxext.files.packages import install_command
from ctxext.files.processes import Terminated, num_processes, raise_on_sigterm, rank, run_alone
from ctxext.finetune.documents import TrainingData
from ctxext.finetune.options import Reporter, RunOptions, TrainingOptions
from ctxext.models.loading import Loading
from ctxext.options import option
from ctxext.tasks.settings import Settings

if TYPE_CHECKING:
    from ctxext.finetune.dry_run import Plan
    from ctxext.finetune.run import Finetuned


_EVALUATION = 10.0
"""Time limit of the evaluation in minutes; what does not fit is left out."""


def with_step_lines(output: Output, progress: Progress) -> Progress:
    """Return a progress callback that prints one line per step if there is no terminal for a progress bar."""
    if output.stderr.is_terminal:
        return progress

    def show(label: str, done: int, total: int) -> None:
        if label.startswith("step "):
            output.note(label)
        else:
            progress(label, done, total)

    return show


def print_plan(output: Output, plan: "Plan") -> None:
    """Print the estimated memory and time of a training run, with remedies if it does not fit."""
    from ctxext.checkpoint.durations import format_duration

    peak, available = plan.peak_memory / 2**30, plan.available_memory / 2**30
    share = 100 * plan.num_trained / plan.num_parameters
    verdict = "" if plan.fits else "   does not fit"
    output.result(
        plan.to_dict(),
        *(
            f"stage {number}    {stage.steps:,} steps of {plan.options.batch_size * stage.length:,} tokens, "
            f"{format_duration(stage.seconds)}, {stage.peak_memory / 2**30:.1f} GiB"
            for number, stage in enumerate(plan.stages if len(plan.stages) > 1 else (), 1)
        ),
        f"sequences  {plan.data.num_sequences:,} × {plan.options.sequence_length:,}, {plan.num_tokens:,} tokens"
        if len(plan.stages) == 1
        else f"sequences  {plan.data.num_sequences:,} of up to {plan.options.sequence_length:,}, "
        f"{plan.num_tokens:,} tokens",
        f"trained    {plan.num_trained:,} parameters ({share:.1f} %)",
        f"memory     about {peak:.1f} of {available:.1f} GiB at the peak{verdict}",
        f"time       about {plan.seconds_per_step:.1f} s per step, {format_duration(plan.seconds)} in total",
        f"           on {plan.device} in {plan.dtype}, measured at {plan.measured_length // 2:,} and "
        f"{plan.measured_length:,} tokens",
    )
    if not plan.fits:
        for remedy in plan.remedies:
            output.note(f"  {remedy}")


def print_result(output: Output, done: "Finetuned", model: str, out: Path, *, merge: bool, report: Any) -> None:
    """Show the result and the next command."""
    from ctxext.finetune.run import CURVE

    has_curve = (out / CURVE).is_file()
    curve = f"curve: {out / CURVE}" if has_curve else f"for a curve: {install_command('matplotlib')}"
    first, last = done.losses[0][1], done.losses[-1][1]
    share = 100 * done.num_trained / done.num_parameters
    kind = "checkpoint" if merge else "adapter"
    output.result(
        {**done.to_dict(), "out": str(out), "evaluation": report},
        done_line(out, f"{kind}   {done.num_trained:,} parameters trained ({share:.1f} %)"),
        f"  loss {first:.3f} → {last:.3f} in {done.options.num_steps} steps   {done.seconds:.0f} s on {done.device} in "
        f"{done.dtype}   {curve}",
    )
    if not merge:
        output.next_step("ctxext", "merge", model, out / "adapter", "MERGED", why="Create a full checkpoint")
    elif report is None:
        output.next_step("ctxext", "eval", model, out, "--lengths", done.options.length, why="Not measured yet")
    elif missed := report.get("num_missed"):
        settings, why = report["settings"], f"The time was not enough for {missed} prompts and documents. Measure all"
        options = ["--task", ",".join(settings["tasks"])]
        options += ["--lengths", ",".join(map(str, settings["lengths"]))] if settings["lengths"] else []
        options += ["--allow-beyond"] if settings["allow_beyond"] else []
        output.next_step("ctxext", "eval", model, out, *options, why=why)


@dataclass(frozen=True)
class Measured:
    """Measurements during and after the training."""

    eval_data: str | None = option(
        None,
        help="Data for measuring the loss during training; for folders and data sets, their held-out split.",
        panel="Data",
    )
    evaluate: str | None = option(
        None,
        help="Tasks to evaluate before and after training, for example needle,short, for 10 minutes at most.",
        flags=("--eval",),
    )


@takes_options(
    order=(..., "merge", "evaluate", "resume", "overwrite", "overwrite_anything", "dry_run", "export_config")
)
def finetune(
    context: typer.Context,
    model: SourceArgument,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Output folder.")],
    *,
    config: ConfigOption = None,
    preset: PresetOption = None,
    without: WithoutOption = None,
    schema: SchemaOption = False,
    chosen: TrainingData,
    measured: Measured,
    training: TrainingOptions,
    run: RunOptions,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Read the data and estimate memory and time without training.")
    ] = False,
    export_config: Annotated[
        str | None,
        typer.Option(
            "--export-config",
            metavar="TRAINER",
            help="Print the configuration of another trainer for this run, without training: axolotl, trl, unsloth, "
            "llama-factory or ms-swift.",
            autocompletion=complete_trainer,
        ),
    ] = None,
    output: Output,
) -> None:
    """Fine-tune an extended model on long sequences, by default with LoRA, and save a portable checkpoint.

    Examples:
    ctxext finetune my-model-32k my-model-32k-lora --data books.jsonl --length 32k

    accelerate launch -m ctxext finetune my-model-32k out --data books.jsonl --batch-size 16
    """
    from ctxext.finetune import run as run_module

    if measured.evaluate and not run.merge:
        raise CtxextError("--eval cannot be combined with --no-merge.", hint="Remove one of them.")
    if export_config is not None:
        if dry_run:
            raise CtxextError("--export-config cannot be combined with --dry-run.", hint="Remove one of them.")
        _print_config(output, export_config, model, out, chosen, measured, training, run)
        return
    output.quiet = output.quiet or rank() != 0
    questions = _questions(measured.evaluate, model, training, run) if measured.evaluate else None
    held_out = None
    if measured.eval_data is not None:
        held_out = dataclasses.replace(chosen, words=(measured.eval_data,), split=None, questions=None)
        held_out.reader(training)  # Raises if the data cannot be read, in a dry run too.
    if dry_run:
        with warnings.catch_warnings():
            # As during training: these come from transformers and peft, not from the user.
            warnings.filterwarnings("ignore", category=FutureWarning)
            with output.progress("estimating memory and time", stopped="") as progress:
                from ctxext.finetune.dry_run import plan_training  # Imports torch, which takes seconds.

                plan = plan_training(
                    model,
                    run_module.make_readers(chosen, training),
                    training,
                    merge=run.merge,
                    revision=run.revision,
                    token=run.token,
                    reporter=Reporter(progress=progress, notify=output.note),
                )
        if rank() == 0:
            print_plan(output, plan)
        return
    try:
        with raise_on_sigterm(), output.progress("training") as progress:
            done = run_module.finetune(
                model,
                out,
                chosen,
                training,
                eval_data=held_out,
                run=run,
                progress=with_step_lines(output, progress),
                notify=output.note,
            )
    except (KeyboardInterrupt, Terminated):
        if run_module.training_folder(out.resolve()).exists():
            launcher = "" if num_processes() == 1 else " under the same launcher"
            output.next_step(*same_command("--resume"), why=f"Stopped. Resume{launcher} with")
        else:
            output.note("Stopped. Nothing was written.")
        raise
    if done is None:
        return
    out.with_name(f"{short_name(out.name)}.run.yaml").write_text(
        used_options(context), encoding="utf-8", errors="replace"
    )
    try:
        report = _evaluate(model, out, questions, output) if questions else None
    except CtxextError:
        output.note(f"{out} was written, but its evaluation failed")
        raise
    print_result(output, done, model, out, merge=run.merge, report=report)


def _print_config(
    output: Output,
    name: str,
    model: str,
    out: Path,
    data: TrainingData,
    measured: Measured,
    training: TrainingOptions,
    run: RunOptions,
) -> None:
    """Print the configuration of another trainer for a run, and what has no equivalent there."""
    from ctxext.converters.card import convert_command
    from ctxext.finetune.base import describe_unused_method, open_model
    from ctxext.finetune.run import make_readers
    from ctxext.finetune.trainers.export import TRAINERS, export_config
    from ctxext.finetune.trainers.run import make_run

    if name not in TRAINERS:
        hint = suggest(name, TRAINERS, f"Choose {', '.join(TRAINERS)}.")
        raise CtxextError(f'Unknown trainer "{name}" of --export-config.', hint=hint)
    make_readers(data, training)  # Raises if the data does not fit the options.
    base, options = open_model(model, training, run.revision, run.token)
    others = {"eval-data": measured.eval_data, "eval": measured.evaluate}
    used = tuple(word for word, value in others.items() if value)
    exported = export_config(TRAINERS[name], make_run(base, out, options, data, used))
    if output.as_json:
        output.result(exported.to_dict())
    else:
        output.stdout.print(exported.text.rstrip("\n"), soft_wrap=True)
    for line in exported.missing:
        output.note(f"no equivalent in {exported.trainer.title} of {line}")
    if base.conversion is not None:
        known = ("--original-length", training.original_length) if training.original_length else ()
        command = convert_command(model, base.checkpoint.revision, base.conversion, exported.model)
        output.next_step(*shlex.split(command), *known, why="Convert first")
    elif training.method:
        output.note(describe_unused_method(model, training.method))
    if not options.full:
        output.next_step("ctxext", "merge", exported.model, out, "MERGED", why="After the training")


def _questions(tasks: str, model: str, training: TrainingOptions, run: RunOptions) -> tuple[Settings, Loading]:
    """Return the settings of evaluation and loading; raise if they are invalid, before hours of training.

    If the source is converted first, it is evaluated at the lengths of the result.
    """
    from ctxext.evaluate.plan import plan_questions
    from ctxext.finetune.base import open_model

    settings = Settings(tasks=(tasks,), seed=training.seed, original_length=training.original_length)
    base, resolved = open_model(model, training, run.revision, run.token) if training.method else (None, training)
    if base is not None and base.conversion is not None and resolved.length is not None:
        lengths = (base.model.encoding.trained_length, resolved.length)
        settings = dataclasses.replace(settings, lengths=tuple(sorted(set(lengths))), allow_beyond=True)
    loading = Loading(revision=run.revision, token=run.token)
    plan_questions([model], settings, loading)
    return settings, loading


def _evaluate(model: str, out: Path, questions: tuple[Settings, Loading], output: Output) -> Any:
    """Evaluate the source and the result on the same prompts, in this process only, and add the results to the card."""
    from ctxext.cli.eval_tables import report_tables
    from ctxext.evaluate.run import plan_run
    from ctxext.publish.upload_plan import PushOptions, pack, seal

    settings, loading = questions
    place = out / "evaluation"
    with run_alone(), output.progress("evaluating") as progress:
        measuring = plan_run(
            [model, str(out)], settings, loading=loading, out=place, minutes=_EVALUATION, progress=progress
        )
        measuring.longest_first = True  # The training was for the new length.
        report = measuring.report()
    for table in report_tables(report, output.stderr.width):
        output.note(table)
    seal(pack(out, ANY_ID, PushOptions(report=place, check=False)))
    return report
