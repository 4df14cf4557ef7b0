"""A fine-tuning from start to finish: check the options, read the data, train, merge."""

import contextlib
import dataclasses
import hashlib
import shutil
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ctxext.console import shows_progress
from ctxext.errors import CtxextError
from ctxext.files.content import as_json
from ctxext.files.output_directory import (
    beside,
    check_out,
    deletable_files,
    discard,
    explain_disk_errors,
    give_name,
    only_run_in,
    recover,
    short_name,
    staging_directory,
)
from ctxext.files.packages import is_installed, require
from ctxext.files.processes import num_processes, rank, return_blocks
from ctxext.files.resuming import check_same_settings
from ctxext.files.schemas import read_json_object
from ctxext.finetune.base import Base, describe_unused_method, open_model
from ctxext.finetune.data import DataReport
from ctxext.finetune.documents import Data, DocumentReader, TrainingData, to_training_data
from ctxext.finetune.options import CHANGEABLE, MASKED_SHARE, Reporter, RunOptions, TrainingOptions
from ctxext.finetune.stages import QUESTIONS, SET_BY_STAGES, WITHOUT_STAGES
from ctxext.merge.run import ADAPTER, read_changes, save_adapter, write_merged
from ctxext.notebook import table
from ctxext.options import accepts_options

SETTINGS, REPORT, CURVE, FINAL = "settings.json", "finetune.json", "loss.png", "final"
RUNS = "runs"
"""The folder of tensorboard's files, here and on the Hub."""


@dataclass(frozen=True)
class Finetuned:
    """Result of a fine-tuning.

    Attributes:
        folder: The checkpoint, or without a merge the adapter.
        options: The options, resolved.
        data: Counts of the data.
        losses: Steps with their losses in nats per token.
        num_trained: Number of trained parameters.
        num_parameters: Number of all parameters.
        seconds: Duration of the training, since the last resume.
        device: Type of the device.
        dtype: Type of the computation.
    """

    folder: Path
    options: TrainingOptions
    data: DataReport
    losses: tuple[tuple[int, float], ...]
    num_trained: int
    num_parameters: int
    seconds: float
    device: str
    dtype: str

    def __repr__(self) -> str:
        """Return a summary with the folder, the number of steps, the last loss and the duration."""
        loss = f", loss {self.losses[-1][1]:.3f}" if self.losses else ""
        return f"Finetuned({self.folder.name!r}: {len(self.losses)} steps{loss}, {self.seconds:.0f} s)"

    def _repr_html_(self) -> str:
        losses = [f"{loss:.3f}" for _, loss in self.losses]
        rows = {"folder": self.folder, "steps": len(losses), "first loss": losses[:1], "last loss": losses[-1:]}
        rows |= {"trained": f"{self.num_trained} of {self.num_parameters} parameters"}
        return table({key: ", ".join(row) if isinstance(row, list) else row for key, row in rows.items()})

    def to_dict(self) -> dict[str, Any]:
        """Return the content of finetune.json and of `--json`."""
        content = {**dataclasses.asdict(self), "options": self.options.to_dict(), "folder": self.folder.name}
        return {**content, "losses": [list(entry) for entry in self.losses]}


def make_readers(data: TrainingData, options: TrainingOptions) -> list[DocumentReader]:
    """Return the function that reads the documents of each stage; raise if the data does not fit the options."""
    shares = [stage.get(QUESTIONS) for stage in options.stages] or [None]
    if data.questions is not None and any(share is not None for share in shares):
        raise CtxextError(SET_BY_STAGES.format(found=QUESTIONS), hint=WITHOUT_STAGES)
    chosen = [data if share is None else dataclasses.replace(data, questions=share) for share in shares]
    return [data.reader(stage) for data, stage in zip(chosen, options.each_stage, strict=True)]


def _check_shared(options: TrainingOptions, *, is_evaluated: bool) -> None:
    """Raise if no other processes can share the sequences of --sequence-parallel."""
    size = options.sequence_parallel
    if size == 1:
        return
    if is_evaluated:
        raise CtxextError(
            f"--sequence-parallel {size} cannot be combined with --eval-data.", hint="Remove one of them."
        )
    if not is_installed("deepspeed"):
        raise CtxextError(
            "--sequence-parallel needs DeepSpeed, which is not installed.",
            hint='DS_BUILD_OPS=0 pip install "ctxext[parallel]"',
        )
    if num_processes() == 1:
        raise CtxextError(
            f"--sequence-parallel {size} needs a multiple of {size} processes, not 1.",
            hint=f"Start them with: accelerate launch --num_processes {size} -m ctxext finetune …",
        )


def training_folder(out: Path) -> Path:
    """Return the folder of a run's saves and sequences, which is deleted when OUT is complete."""
    return out.parent / f"{short_name(out.name)}.training"


@shows_progress("training")
@accepts_options(TrainingOptions)
@accepts_options(RunOptions, "run")
@accepts_options(Reporter, "reporter")
def finetune(
    model: str | Path,
    out: str | Path,
    data: Data,
    options: TrainingOptions,
    *,
    eval_data: Data | None = None,
    run: RunOptions,
    reporter: Reporter,
) -> Finetuned | None:
    """Train an extended checkpoint on long sequences.

    Args:
        model: A folder, a Hub id, or `demo`.
        out: The folder to create.
        data: A file, a folder, the id of a data set, or `demo` for generated documents; a list of texts or records
            (dicts), or of Paths; or `TrainingData`, which also specifies the format of records.
        options: Options of the training. Each field is also a keyword argument, as steps=100.
        eval_data: Data for the loss during training; its held-out split if it has one.
        run: Options of the source, of the result, and of resuming. Each field is also a keyword argument, as
            merge=False.
        reporter: Callbacks of the run; its fields are keywords too. Without `progress`, a terminal or a notebook shows
            a progress bar.

    Returns:
        The result; None in all processes except the first.

    Raises:
        CtxextError: The model, the data, an option or OUT is invalid; nothing is written.
    """
    for package in ("datasets", "peft"):
        require(package, "Training")
    return_blocks()
    _check_shared(options, is_evaluated=eval_data is not None)
    chosen = to_training_data(data)
    held_out = None if eval_data is None else to_training_data(eval_data, split=None)
    readers = make_readers(chosen, options), held_out.reader(options) if held_out else None
    out = Path(out)
    base, options = open_model(str(model), options, run.revision, run.token)
    if options.method and base.conversion is None and reporter.notify is not None:
        reporter.notify(describe_unused_method(str(model), options.method))
    if options.full and not run.merge:
        raise CtxextError("--full has no adapter and cannot be combined with --no-merge.", hint="Remove --no-merge.")
    if options.strength != 1 and not run.merge:
        raise CtxextError("--strength is for the merge, so it cannot be combined with --no-merge.", hint="Remove one.")
    if options.keep_best and held_out is None:
        raise CtxextError("--keep-best needs evaluation data.", hint="Add --eval-data.")
    check_out(out, base.checkpoint.folder, run)
    out = out.resolve()
    folder = training_folder(out)
    with only_run_in(out):
        if rank() == 0:
            with explain_disk_errors(out):
                recover(out)
                recover(folder)
        deletable = deletable_files(out, run)
        named = {**chosen.describe(), **({"eval": held_out.describe()["name"]} if held_out else {})}
        if rank() == 0:
            _begin(folder, _collect_settings(base, options, named), resume=run.resume, overwrite=run.replaces)
        try:
            base = base.convert(folder, options.original_length, reporter.progress)
            with warnings.catch_warnings(), explain_disk_errors(folder):
                # The Trainer and peft call models in ways that transformers deprecates.
                warnings.filterwarnings("ignore", category=FutureWarning)
                result = _train(base, folder, readers, options, run, reporter)
        except CtxextError:
            if rank() == 0 and not any(folder.glob("checkpoint-*")):
                discard(folder)
            raise
        if rank() != 0:
            return None
        result = dataclasses.replace(result, folder=out)
        with explain_disk_errors(out), staging_directory(out) as work:
            reporter.report_stage("writing the result")
            _write(base, folder, result, work, named)
            if run.merge:
                notes = _make_notes(base, result, named)
                trained = folder / FINAL if options.full else work / ADAPTER
                changes = read_changes(base.checkpoint, trained, is_adapter=not options.full)
                strength = result.options.strength
                write_merged(base.checkpoint, changes, work, notes=notes, strength=strength, progress=reporter.progress)
            give_name(work, out, overwrite=run.replaces, deletable=deletable)
        discard(folder)
    return result


def _collect_settings(base: Base, options: TrainingOptions, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that must be the same when a run is resumed."""
    checkpoint = base.checkpoint
    digest = hashlib.sha256((checkpoint.folder / "config.json").read_bytes())
    for path in checkpoint.weight_files:
        with (checkpoint.folder / path).open("rb") as file:
            digest.update(f"{path} {checkpoint.size_of(path)}".encode() + file.read(1 << 20))
    chosen = {key: value for key, value in options.to_dict().items() if key not in CHANGEABLE}
    return {"model": {"name": checkpoint.public_name, "digest": digest.hexdigest()}, "data": dict(data), **chosen}


def _begin(folder: Path, settings: Mapping[str, Any], *, resume: bool, overwrite: bool) -> None:
    """Create the training folder, or check that the existing one belongs to the same run."""
    known = folder / SETTINGS
    with contextlib.suppress(OSError):
        folder.rmdir()  # An empty folder has nothing to resume.
    if not folder.exists():
        if resume:
            raise CtxextError(f'No unfinished run at "{folder}".', hint="Remove --resume to start one.")
    elif not known.is_file():
        raise CtxextError(f'"{folder}" exists and was not created by a run.', hint="Choose another OUT.")
    elif resume:
        # An earlier version may have recorded options that may now change.
        old = {key: value for key, value in read_json_object(known).items() if key in settings}
        check_same_settings(folder, old, settings)
        return
    elif not overwrite:
        raise CtxextError(
            f'"{folder}" contains an unfinished run.', hint="Continue with --resume, or start over with --overwrite."
        )
    else:
        discard(folder)
    # Write under another name and rename, so that a training folder always has its settings.
    with explain_disk_errors(folder), beside(folder) as place:
        (place / "new").mkdir()
        (place / "new" / SETTINGS).write_text(as_json(settings), encoding="utf-8")
        (place / "new").rename(folder)


def _train(
    base: Base,
    folder: Path,
    readers: tuple[Sequence[DocumentReader], DocumentReader | None],
    options: TrainingOptions,
    run: RunOptions,
    reporter: Reporter,
) -> Finetuned:
    """Load the model, read the data, train, and save the trained weights as the folder `final`."""
    reporter.report_stage("loading the libraries")
    from ctxext.finetune.prepare import prepare
    from ctxext.finetune.saves import Saves, find_newest_save
    from ctxext.finetune.trainer import train

    notify = reporter.notify
    prepared = prepare(base, folder, readers[0], options, merge=run.merge, reporter=reporter, read_held_out=readers[1])
    saves = find_newest_save(folder, prepared.options.num_steps, prepared.model) if run.resume else Saves(None, ())
    if run.resume and notify is not None:
        for note in saves.notes:
            notify(note)
        step = saves.newest.name.rsplit("-", 1)[1] if saves.newest else ""
        notify(f"resuming after step {step}" if step else "nothing saved yet: starting at step 1")
    reporter.report_stage("starting")
    started = time.perf_counter()
    trainer = train(prepared, folder, reporter, saves.newest)
    trainer.save_model(str(folder / FINAL))
    logged = (entry for entry in trainer.state.log_history if entry.get("loss") is not None)
    losses = tuple((entry["step"], entry["loss"]) for entry in logged)
    seconds = round(time.perf_counter() - started, 2)
    counts, precision = (prepared.num_trained, prepared.num_parameters), prepared.precision
    return Finetuned(
        folder, prepared.options, prepared.report, losses, *counts, seconds, precision.device.type, precision.dtype
    )


def _write(base: Base, folder: Path, result: Finetuned, work: Path, data: Mapping[str, Any]) -> None:
    """Write the adapter, the loss curve and the reports."""
    from ctxext.finetune.step_log import STEPS

    options = result.options
    if not options.full:
        save_adapter(folder / FINAL, work / ADAPTER, base.checkpoint)
    if (folder / RUNS).is_dir():
        shutil.copytree(folder / RUNS, work / RUNS)
    shutil.copyfile(folder / STEPS, work / STEPS)
    lengths = [options.length_of_step(step) for step in range(options.num_steps)]
    if is_installed("matplotlib"):
        from ctxext.report.pictures import as_png, draw_training

        (work / CURVE).write_bytes(as_png(draw_training(result.losses, lengths), dpi=120))
    settings = {**result.to_dict(), "data": {**dataclasses.asdict(result.data), **data}}
    (work / REPORT).write_text(as_json(settings), encoding="utf-8")


def _make_notes(base: Base, result: Finetuned, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the description of the training for the model card."""
    options, stages = result.options, result.options.each_stage
    how = "all weights" if options.full else f"LoRA rank {options.rank}, alpha {options.alpha:g}"
    how += f", base in {options.quantize} while training" if options.quantize != "none" else ""
    has_table = bool(base.model.encoding.learned_tensors) and not options.full
    extras = {"position embeddings": has_table, "norms": options.train_norms, "embeddings": options.train_embeddings}
    how += "".join(f", {name}" for name, is_on in extras.items() if is_on)
    return {
        "trained": how,
        "data": str(data["name"]) + (f", questions {data['questions']:g}" if "questions" in data else ""),
        "learned": ("answers, if the data marks them" if options.learn == "answers" else "every token")
        + (f"; {100 * MASKED_SHARE:g} % of them masked" if base.is_masked else ""),
        "length": f"{options.start_length} doubling to {options.length}" if options.start_length else options.length,
        "steps": _join(stage.num_steps for stage in stages),
        "batch_size": options.batch_size,
        "learning_rate": _join(stage.learning_rate for stage in stages),
        "positions": options.positions
        + (f", windows of {_join(stage.window for stage in stages)}" if stages[0].window else ""),
        "short_share": _join(stage.short_share for stage in stages),
        "keep_short": options.keep_short,
        **({"strength": options.strength} if options.strength != 1 else {}),
        "seed": options.seed,
    }


def _join(values: Iterable[Any]) -> Any:
    """Return a value of all stages, or their values as text."""
    listed = list(values)
    return listed[0] if len(set(listed)) == 1 else ", ".join(f"{value:g}" for value in listed)
