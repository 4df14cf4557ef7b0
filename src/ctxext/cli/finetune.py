"""`ctxext finetune`: a short training that makes a longer context work."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ctxext.cli import finetune_options as own
from ctxext.cli.options import (
    JsonOption,
    QuietOption,
    RevisionOption,
    SourceArgument,
    TokenOption,
    VerboseOption,
    names_in,
)
from ctxext.cli.output import Output
from ctxext.cli.terminal import done_line
from ctxext.errors import CtxextError
from ctxext.files import sha256_of
from ctxext.recipes.length import parse_length

if TYPE_CHECKING:
    from ctxext.finetune.documents import DocumentReader
    from ctxext.finetune.options import TrainingOptions
    from ctxext.finetune.run import Finetuned

OutArgument = Annotated[Path, typer.Argument(metavar="OUT", help="The folder to make.")]


def finetune(
    model: SourceArgument,
    out: OutArgument,
    *,
    data: own.DataOption,
    length: own.LengthOption = None,
    start_length: own.StartLengthOption = None,
    learn: own.LearnOption = "answers",
    steps: own.StepsOption = 200,
    batch_size: own.BatchSizeOption = 8,
    merge: own.MergeOption = True,
    evaluate: own.EvalOption = None,
    resume: own.ResumeOption = False,
    overwrite: own.OverwriteOption = False,
    pack: own.PackOption = "off",
    short_share: own.ShortShareOption = 0.2,
    positions: own.PositionsOption = "full",
    window: own.WindowOption = None,
    attention: own.AttentionOption = "full",
    group: own.GroupOption = None,
    rank: own.RankOption = 16,
    alpha: own.AlphaOption = None,
    dropout: own.DropoutOption = 0.0,
    targets: own.TargetsOption = None,
    rslora: own.RsloraOption = False,
    dora: own.DoraOption = False,
    train_norms: own.TrainNormsOption = False,
    train_embeddings: own.TrainEmbeddingsOption = False,
    full: own.FullOption = False,
    micro_batch: own.MicroBatchOption = 1,
    learning_rate: own.LearningRateOption = None,
    schedule: own.ScheduleOption = "cosine",
    warmup: own.WarmupOption = 0.05,
    checkpointing: own.CheckpointingOption = None,
    seed: own.SeedOption = 0,
    save_every: own.SaveEveryOption = 50,
    report_to: own.ReportToOption = "none",
    quantize: own.QuantizeOption = "none",
    context_parallel: own.ContextParallelOption = 1,
    device: own.DeviceOption = "auto",
    dtype: own.DtypeOption = "auto",
    revision: RevisionOption = None,
    token: TokenOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Train an extended model on long sequences, with LoRA by default, and write it as a portable checkpoint.

    Examples:
    ctxext finetune my-model-32k my-model-32k-lora --data books.jsonl --length 32k

    accelerate launch -m ctxext finetune my-model-32k out --data books.jsonl --batch-size 16
    """
    words = locals()
    from ctxext.finetune import run
    from ctxext.finetune.options import TrainingOptions

    given = {field.name: words[field.name] for field in dataclasses.fields(TrainingOptions) if field.name in words}
    lengths = {name: parse_length(value) if value else None for name, value in _lengths(given).items()}
    _check_tasks(evaluate)
    output = Output(as_json=as_json, quiet=quiet or not run.is_first(), verbose=verbose)
    options = TrainingOptions(**{**given, **lengths, "targets": names_in([targets or ""])})
    with output.progress("") as progress:
        try:
            done = run.finetune(
                model,
                out,
                _reader(data, options),
                options,
                data=_described(data),
                revision=revision,
                token=token,
                merge=merge,
                resume=resume,
                overwrite=overwrite,
                progress=progress,
                tell=output.note,
            )
        except KeyboardInterrupt:
            output.next_step("the same command with --resume", "Stopped; go on with")
            raise
    if done is None:
        return
    report = _evaluate(model, out, names_in([evaluate]), done, output) if evaluate and merge else None
    _tell(output, done, model, out, merge=merge, report=report)


def _lengths(given: dict[str, Any]) -> dict[str, Any]:
    return {name: given[name] for name in ("length", "start_length", "window", "group")}


def _reader(data: str, options: "TrainingOptions") -> "DocumentReader":
    """How the documents are read, once the tokenizer is there."""
    from ctxext.demo.long_documents import long_documents
    from ctxext.finetune.documents import read_documents

    if data == "demo" and not Path(data).is_file():
        return lambda tokenizer, wanted: long_documents(tokenizer, wanted, options.seed, options.learn)
    return lambda tokenizer, _: read_documents(data, tokenizer, options.learn)


def _described(data: str) -> dict[str, Any]:
    """The data as reports name it: a file by its last part and its digest."""
    path = Path(data)
    if not path.is_file():
        return {"name": data}
    return {"name": path.name, "sha256": sha256_of(path)}


def _check_tasks(tasks: str | None) -> None:
    """Refuse unknown tasks before hours of training."""
    from ctxext.evaluate.tasks.registry import TASKS

    for task in names_in([tasks or ""]):
        if task not in TASKS:
            raise CtxextError(f'There is no task "{task}".', hint=f"Tasks: {', '.join(TASKS)}.")


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


def _tell(output: Output, done: "Finetuned", model: str, out: Path, *, merge: bool, report: Any) -> None:
    """Show what was made and the next command."""
    first, last = done.losses[0][1], done.losses[-1][1]
    share = 100 * done.num_trained / done.num_parameters
    kind = "checkpoint" if merge else "adapter"
    output.result(
        {**done.to_dict(), "out": str(out), "evaluation": report},
        done_line(out, f"{kind}   {done.num_trained:,} parameters trained ({share:.1f} %)"),
        f"  loss {first:.3f} → {last:.3f} in {done.options.steps} steps   {done.seconds:.0f} s   curve: {out}/loss.png",
    )
    if not merge:
        output.next_step(f"ctxext merge {model} {out}/adapter MERGED", "A full checkpoint")
    elif report is None:
        length = done.options.length
        output.next_step(f"ctxext eval {model} {out} --task needle,short --lengths {length}", "Not measured yet")
