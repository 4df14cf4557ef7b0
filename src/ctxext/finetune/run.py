"""A fine-tune from start to finish: check the options, read the data, train, merge."""

import contextlib
import dataclasses
import hashlib
import json
import shutil
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ctxext.errors import CtxextError
from ctxext.files.content import Progress, as_json
from ctxext.files.extras import is_installed, require
from ctxext.files.locks import locked, short_name
from ctxext.files.output_directory import (
    beside,
    check_out,
    deletable_files,
    delete,
    discard,
    explain_disk_errors,
    give_name,
    recover,
    staging_directory,
)
from ctxext.files.processes import rank
from ctxext.files.schemas import read_json_object
from ctxext.finetune.base import Base, open_base
from ctxext.finetune.data import DataReport
from ctxext.finetune.documents import DocumentReader
from ctxext.finetune.merge import ADAPTER, save_adapter, tied_embeddings, write_merged
from ctxext.finetune.options import CHANGEABLE, Reporter, RunOptions, TrainingOptions
from ctxext.finetune.prepare import HELD_OUT, check_fits, prepare
from ctxext.finetune.served import Served, check_served, served_with
from ctxext.finetune.tensors import JoinedChanges, WholeChanges, stored_shapes
from ctxext.finetune.training_data import Data, training_data
from ctxext.notebook import table
from ctxext.options import accepts_options

SETTINGS, REPORT, CURVE, FINAL = "settings.json", "finetune.json", "loss.png", "final"
RUNS = "runs"
"""The folder of tensorboard's files, here and on the Hub."""


@dataclass(frozen=True)
class Finetuned:
    """The result of a fine-tune.

    Attributes:
        folder: The checkpoint, or the adapter alone without a merge.
        options: The options, settled.
        data: Counts of the data.
        losses: Each step with its loss in nats per token.
        num_trained: Number of trained parameters.
        num_parameters: Number of all parameters.
        seconds: Duration of the training; of a resumed run, since it was resumed.
    """

    folder: Path
    options: TrainingOptions
    data: DataReport
    losses: tuple[tuple[int, float], ...]
    num_trained: int
    num_parameters: int
    seconds: float

    def __repr__(self) -> str:
        """The folder, the steps and the last loss."""
        loss = f", loss {self.losses[-1][1]:.3f}" if self.losses else ""
        return f"Finetuned({self.folder.name!r}: {len(self.losses)} steps{loss}, {self.seconds:.0f} s)"

    def _repr_html_(self) -> str:
        losses = [f"{loss:.3f}" for _, loss in self.losses]
        rows = {"folder": self.folder, "steps": len(losses), "first loss": losses[:1], "last loss": losses[-1:]}
        rows |= {"trained": f"{self.num_trained} of {self.num_parameters} parameters"}
        return table({key: ", ".join(row) if isinstance(row, list) else row for key, row in rows.items()})

    def to_dict(self) -> dict[str, Any]:
        """The content of finetune.json and of `--json`."""
        content = {**dataclasses.asdict(self), "options": self.options.to_dict(), "folder": self.folder.name}
        return {**content, "losses": [list(entry) for entry in self.losses]}


def training_folder(out: Path) -> Path:
    """The folder of a run's saves and sequences, deleted when OUT is complete."""
    return out.parent / f"{short_name(out.name)}.training"


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
        data: A file, a folder, the id of a data set, or `demo` for synthetic documents; a list of texts or of records
            (dicts), or of Paths; or `TrainingData`, which also says how records are read.
        options: How to train. Each field is a keyword of this function too, as steps=100.
        eval_data: Data on which the loss is measured during training; its held-out split where it has one.
        run: Where the model comes from, what is written, and whether a stopped run continues. Each field is a
            keyword of this function too, as merge=False.
        reporter: Called during the run; its fields are keywords too.

    Returns:
        The result; None in all processes but the first.

    Raises:
        CtxextError: the model, the data, an option or the place is refused; nothing is written then.
    """
    for package in ("datasets", "peft"):
        require(package, "Training")
    chosen = training_data(data)
    held_out = None if eval_data is None else training_data(eval_data, split=None)
    readers = chosen.reader(options), held_out.reader(options) if held_out else None
    out = Path(out)
    base = open_base(
        str(model), options.length, revision=run.revision, token=run.token, original_length=options.original_length
    )
    check_fits(base, options)
    served = served_with(base, options.serve_factor)
    encoding = base.model.encoding
    options = options.settled(window=encoding.context_length, trained_length=encoding.trained_length)
    if options.full and not run.merge:
        raise CtxextError("--full has no adapter to keep apart.", hint="Leave --no-merge out.")
    if options.serve_factor and not run.merge:
        raise CtxextError("--serve-factor is for a merged checkpoint.", hint="Leave --no-merge out.")
    if options.keeps_best and held_out is None:
        raise CtxextError("Which save is best is measured on other data.", hint="Name it with --eval-data.")
    check_out(out, base.checkpoint.folder, run)
    out = out.resolve()
    folder = training_folder(out)
    with _only_run_in(out):
        deletable = deletable_files(out, run)
        named = {**chosen.described(), **({"eval": held_out.described()["name"]} if held_out else {})}
        if rank() == 0:
            _begin(folder, _settings(base, options, named), resume=run.resume, overwrite=run.replaces)
        try:
            with warnings.catch_warnings(), explain_disk_errors(folder):
                # Trainer and peft call models in ways that transformers deprecates.
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
            _write(base, folder, result, work, named)
            if run.merge:
                notes = _notes(base, result, named)
                notes |= {"schedule": f"trained with {served.summary}"} if served.summary else {}
                _merge(served, folder, result, work, notes, reporter.progress)
                if served.summary:
                    check_served(work)
            give_name(work, out, overwrite=run.replaces, deletable=deletable)
        discard(folder)
    return result


@contextlib.contextmanager
def _only_run_in(out: Path) -> Iterator[None]:
    """Lock OUT for the whole run, in the first of its processes."""
    if rank() != 0:
        yield
        return
    with explain_disk_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
    with locked(out):
        with explain_disk_errors(out):
            recover(out)
            recover(training_folder(out))
        yield


def _settings(base: Base, options: TrainingOptions, data: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that must be the same when a run is resumed."""
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
            raise CtxextError(f'There is no unfinished run at "{folder}".', hint="Leave --resume out to begin one.")
    elif not known.is_file():
        raise CtxextError(f'"{folder}" is in the way: a run keeps its saves there.', hint="Choose another OUT.")
    elif resume:
        old = read_json_object(known)
        different = [key for key in settings if old.get(key) != json.loads(json.dumps(settings[key]))]
        if different:
            key = different[0]
            raise CtxextError(
                f'The unfinished run at "{folder}" has another {key.replace("_", " ")}: {_short(old.get(key))}, '
                f"not {_short(settings[key])}.",
                hint="Give the same options as before, or start again with --overwrite.",
            )
        return
    elif not overwrite:
        raise CtxextError(
            f'"{folder}" holds an unfinished run.', hint="Go on with --resume, or start again with --overwrite."
        )
    else:
        discard(folder)
    # Written under another name and renamed, so that a training folder always has its settings.
    new = beside(folder, "new")
    with explain_disk_errors(folder):
        try:
            new.mkdir()
            (new / SETTINGS).write_text(as_json(settings), encoding="utf-8")
            new.rename(folder)
        except BaseException:
            delete(new)
            raise


def _short(value: Any) -> str:
    if isinstance(value, Mapping):
        return " ".join(str(entry)[:40] for entry in value.values())
    return f'"{value}"'


def _train(
    base: Base,
    folder: Path,
    readers: tuple[DocumentReader, DocumentReader | None],
    options: TrainingOptions,
    run: RunOptions,
    reporter: Reporter,
) -> Finetuned:
    """Load the model, read the data, train, and save the trained weights as the folder `final`."""
    from ctxext.finetune.batches import Sequences
    from ctxext.finetune.loop import held_out_sequences, newest_save, train

    tell = reporter.tell
    ready = prepare(base, folder, readers[0], options, merge=run.merge, tell=tell, read_held_out=readers[1])
    options = ready.options
    last_save = newest_save(folder, options.steps) if run.resume else None
    if run.resume and tell is not None:
        tell(f"going on after step {last_save.name.rsplit('-', 1)[1]}" if last_save else "nothing was saved yet")
    sequences = Sequences(folder, options, ready.reading)
    started = time.perf_counter()
    held_out = None
    if ready.held_out:
        held_out = held_out_sequences(folder / HELD_OUT, options, ready.held_out.num_sequences, ready.reading)
    trainer = train(
        ready.model,
        ready.arguments,
        sequences,
        reporter,
        last_save,
        held_out=held_out,
        measures=ready.measures,
    )
    trainer.save_model(str(folder / FINAL))
    logged = (entry for entry in trainer.state.log_history if entry.get("loss") is not None)
    losses = tuple((entry["step"], entry["loss"]) for entry in logged)
    seconds = round(time.perf_counter() - started, 2)
    return Finetuned(folder, options, ready.report, losses, ready.num_trained, ready.num_parameters, seconds)


def _write(base: Base, folder: Path, result: Finetuned, work: Path, data: Mapping[str, Any]) -> None:
    """Write the adapter, the loss curve and the reports."""
    from ctxext.finetune.watch import STEPS

    options = result.options
    if not options.full:
        save_adapter(folder / FINAL, work / ADAPTER, base.checkpoint)
    if (folder / RUNS).is_dir():
        shutil.copytree(folder / RUNS, work / RUNS)
    shutil.copyfile(folder / STEPS, work / STEPS)
    lengths = [options.length_of_step(step) for step in range(options.steps)]
    if is_installed("matplotlib"):
        draw_losses(result.losses, lengths, work / CURVE)
    settings = {**result.to_dict(), "data": {**dataclasses.asdict(result.data), **data}}
    (work / REPORT).write_text(as_json(settings), encoding="utf-8")


_SPAN = 0.05
"""The share of the steps over which a curve is smoothed."""


def draw_losses(losses: Sequence[tuple[int, float]], lengths: Sequence[int], path: Path) -> None:
    """Draw the loss of every step as a point, and a smoothed curve, in one colour for each length.

    The losses of different lengths lie at different heights, so that one curve for all would only show the mixture.

    Args:
        losses: Step, counted from 1, and loss.
        lengths: Tokens of a sequence in each step.
        path: The PNG file to make.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    from ctxext.evaluate.report.colours import series_style

    figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for number, length in enumerate(sorted(set(lengths), reverse=True)):
        chosen = [(step, loss) for step, loss in losses if lengths[step - 1] == length]
        if chosen:
            colour, dashes = series_style(number)
            steps, values = zip(*chosen, strict=True)
            axes.plot(steps, values, ".", color=colour, alpha=0.3, markersize=4)
            style = (0, dashes) if dashes else "-"
            axes.plot(steps, smoothed(steps, values), color=colour, linestyle=style, label=f"{length:,} tokens")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)


def smoothed(steps: Sequence[int], values: Sequence[float]) -> list[float]:
    """At each step the mean of the values around it, as many on either side, so that a slope stays where it is."""
    reach = max(1.0, _SPAN * (steps[-1] - steps[0]) / 2)
    means = []
    for at in steps:
        # Near an end the window is as short as the way to it.
        near = min(reach, at - steps[0], steps[-1] - at)
        window = [value for step, value in zip(steps, values, strict=True) if abs(step - at) <= near]
        means.append(sum(window) / len(window))
    return means


def _merge(
    served: Served,
    folder: Path,
    result: Finetuned,
    work: Path,
    notes: Mapping[str, Any],
    progress: Progress | None,
) -> None:
    """Write the full checkpoint."""
    checkpoint = served.checkpoint
    shapes, tied = stored_shapes(checkpoint), tied_embeddings(checkpoint)
    changes = (
        WholeChanges(folder / FINAL, shapes, tied=tied)
        if result.options.full
        else JoinedChanges(work / ADAPTER, checkpoint, shapes, tied=tied)
    )
    write_merged(checkpoint, changes, work, notes=notes, texts=served.texts, progress=progress)


def _notes(base: Base, result: Finetuned, data: Mapping[str, Any]) -> dict[str, Any]:
    """What a published card says about the training."""
    options = result.options
    how = "all weights" if options.full else f"LoRA rank {options.rank}, alpha {options.alpha:g}"
    how += f", base in {options.quantize} while training" if options.quantize != "none" else ""
    has_table = bool(base.model.encoding.learned_tensors) and not options.full
    extras = {"rslora": options.rslora, "dora": options.dora, "position table": has_table, "norms": options.train_norms}
    extras |= {"embeddings": options.train_embeddings}
    how += "".join(f", {name}" for name, is_on in extras.items() if is_on)
    return {
        "trained": how,
        "data": str(data["name"]),
        "learned": ("answers, where the data marks them" if options.learn == "answers" else "every token")
        + (f"; {100 * options.mlm_probability:g} % of them masked" if base.is_masked else ""),
        "length": f"{options.start_length} doubling to {options.length}" if options.start_length else options.length,
        "steps": options.steps,
        "batch_size": options.batch_size,
        "learning_rate": options.learning_rate,
        "positions": options.positions + (f", windows of {options.window}" if options.window else ""),
        "attention": options.attention,
        "short_share": options.short_share,
        "keep_short": options.keep_short,
        "seed": options.seed,
    }
