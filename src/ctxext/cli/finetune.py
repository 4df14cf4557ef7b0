"""`ctxext finetune`: a short training that makes a longer context work."""

import dataclasses
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ctxext.cli import finetune_options as own
from ctxext.cli.config_file import ConfigOption, used_options
from ctxext.cli.finetune_data import DataChoice
from ctxext.cli.finetune_view import same_command, tell_plan, tell_result, with_step_lines
from ctxext.cli.options import (
    JsonOption,
    OriginalLengthOption,
    OverwriteAnythingOption,
    QuietOption,
    RevisionOption,
    SourceArgument,
    TokenOption,
    VerboseOption,
    names_in,
)
from ctxext.cli.output import Output
from ctxext.locks import short_name
from ctxext.recipes.length import parse_length

if TYPE_CHECKING:
    from ctxext.finetune.dry_run import Plan
    from ctxext.finetune.options import TrainingOptions
    from ctxext.finetune.run import Finetuned

OutArgument = Annotated[Path, typer.Argument(metavar="OUT", help="The folder to make.")]


def finetune(
    context: typer.Context,
    model: SourceArgument,
    out: OutArgument,
    *,
    config: ConfigOption = None,
    data: own.DataOption = None,
    record_format: own.FormatOption = "auto",
    text_field: own.TextFieldOption = "text",
    split: own.SplitOption = "train",
    skip_bad_rows: own.SkipBadRowsOption = False,
    long_share: own.LongShareOption = None,
    eval_data: own.EvalDataOption = None,
    length: own.LengthOption = None,
    start_length: own.StartLengthOption = None,
    original_length: OriginalLengthOption = None,
    learn: own.LearnOption = "answers",
    steps: own.StepsOption = 200,
    epochs: own.EpochsOption = None,
    batch_size: own.BatchSizeOption = 8,
    merge: own.MergeOption = True,
    evaluate: own.EvalOption = None,
    resume: own.ResumeOption = False,
    overwrite: own.OverwriteOption = False,
    overwrite_anything: OverwriteAnythingOption = False,
    dry_run: own.DryRunOption = False,
    pack: own.PackOption = "off",
    short_share: own.ShortShareOption = 0.2,
    keep_short: own.KeepShortOption = False,
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
    mlm_probability: own.MlmProbabilityOption = 0.15,
    micro_batch: own.MicroBatchOption = 1,
    learning_rate: own.LearningRateOption = None,
    schedule: own.ScheduleOption = "cosine",
    warmup: own.WarmupOption = 0.05,
    optimizer: own.OptimizerOption = "adamw_torch_fused",
    weight_decay: own.WeightDecayOption = 0.0,
    beta1: own.Beta1Option = 0.9,
    beta2: own.Beta2Option = 0.999,
    neftune: own.NeftuneOption = None,
    checkpointing: own.CheckpointingOption = None,
    seed: own.SeedOption = 0,
    save_every: own.SaveEveryOption = 50,
    eval_every: own.EvalEveryOption = None,
    keep_best: own.KeepBestOption = False,
    patience: own.PatienceOption = None,
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
    from ctxext.finetune.prepare import is_first

    given = {field.name: words[field.name] for field in dataclasses.fields(TrainingOptions) if field.name in words}
    lengths = {name: parse_length(value) if value else None for name, value in _lengths(given).items()}
    _check_tasks(evaluate, model, revision, token)
    output = Output(as_json=as_json, quiet=quiet or not is_first(), verbose=verbose)
    options = TrainingOptions(**{**given, **lengths, "targets": names_in([targets or ""])})
    chosen = DataChoice(tuple(data or ()), record_format, text_field, split, skip_bad_rows, long_share)
    held_out = dataclasses.replace(chosen, words=(eval_data,), split=None, long_share=None) if eval_data else None
    if dry_run:
        tell_plan(output, _plan(model, chosen, options, merge=merge, revision=revision, token=token, output=output))
        return
    with output.progress("") as progress:
        try:
            done = run.finetune(
                model,
                out,
                chosen.reader(options),
                options,
                data={**chosen.described(), **({"eval": held_out.described()["name"]} if held_out else {})},
                read_held_out=held_out.reader(options) if held_out else None,
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


def _lengths(given: dict[str, Any]) -> dict[str, Any]:
    return {name: given[name] for name in ("length", "start_length", "original_length", "window", "group")}


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


def _plan(model: str, chosen: DataChoice, options: "TrainingOptions", *, output: Output, **given: Any) -> "Plan":
    from ctxext.finetune.dry_run import dry_run

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning)  # As while training: transformers' own business.
        return dry_run(model, chosen.reader(options), options, tell=output.note, **given)
