"""Training with transformers' Trainer: measurements, progress, logs and stopping."""

import atexit
import dataclasses
import functools
import itertools
import operator
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import ConcatDataset, Dataset, SequentialSampler

from ctxext.errors import CtxextError
from ctxext.files.offline import forbid_network
from ctxext.files.processes import num_processes, rank
from ctxext.finetune.batches import ModelInputs, Parts, Sequences, Tensors, collate
from ctxext.finetune.data import HELD_OUT, DataReport, stage_folders
from ctxext.finetune.loss import PositionLosses
from ctxext.finetune.models import Precision
from ctxext.finetune.options import Reporter, TrainingOptions
from ctxext.finetune.saves import adapt_state, clear_save

with forbid_network():
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments
from ctxext.finetune.needle_probe import NeedleProbe
from ctxext.finetune.step_log import STEPS, LiveLine
from ctxext.finetune.stopping import StopAfterStep, largest_of_processes


class OrderedTrainer(Trainer):  # type: ignore[misc]
    """A Trainer that uses the sequences in the order of the data set, and the learning rates of the options."""

    def __init__(self, model: Any, arguments: TrainingArguments, options: TrainingOptions, **kwargs: Any) -> None:
        super().__init__(model, arguments, data_collator=collate, **kwargs)
        self.options = options
        self.remove_callback(PrinterCallback)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Set the learning rate of each step."""
        self.lr_scheduler = LambdaLR(optimizer or self.optimizer, self._share_of_peak)
        return self.lr_scheduler

    def _share_of_peak(self, step: int) -> float:
        return self.options.rate_of_step(step) / self.options.peak_rate

    def _load_from_checkpoint(self, resume_from_checkpoint: str, *args: Any, **kwargs: Any) -> None:
        with _explain_load_errors(resume_from_checkpoint, "weights"):
            super()._load_from_checkpoint(resume_from_checkpoint, *args, **kwargs)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with _explain_load_errors(checkpoint, "optimizer and schedule"):
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        with _explain_load_errors(checkpoint, "random state"):
            super()._load_rng_state(checkpoint)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        if self.args.should_save:
            clear_save(Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}")
        super()._save_checkpoint(*args, **kwargs)

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)


@contextmanager
def _explain_load_errors(save: str | None, part: str) -> Iterator[None]:
    """Report the error of an unreadable save in one line."""
    try:
        yield
    except (CtxextError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if save is None:
            raise
        # The message of torch recommends running code from the file.
        raise CtxextError(
            f'"{save}" is damaged: its {part} cannot be loaded ({type(error).__name__}).',
            hint="Remove that folder to resume from an earlier save, or start over with --overwrite.",
        ) from error


def open_held_out(folder: Path, options: TrainingOptions, count: int, inputs: ModelInputs) -> Sequences:
    """Open the held-out sequences of the full length, each used once and in order."""
    longest = max(options.each_stage, key=lambda stage: stage.sequence_length)
    once: dict[str, Any] = {"steps": count, "batch_size": 1, "micro_batch": 1, "short_share": 0.0, "start_length": None}
    return Sequences(folder, dataclasses.replace(longest, **once), inputs)


class StageChange(TrainerCallback):  # type: ignore[misc]
    """Callback that begins or ends the recomputation of activations where a stage does."""

    def __init__(self, options: TrainingOptions) -> None:
        self.options = options

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Recompute activations in this step, or not."""
        if len({stage.checkpointing for stage in self.options.each_stage}) == 1:
            return
        stage, _ = self.options.find_stage(state.global_step)
        if stage.checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=args.gradient_checkpointing_kwargs)
        else:
            model.gradient_checkpointing_disable()


_SECONDS_BETWEEN, _RATIO = 600.0, 20
"""Longest time between two saves, and its least ratio to the time of a save, so that large models also train."""


class MoreSaves(TrainerCallback):  # type: ignore[misc]
    """Callback that saves after each stage, and when a killed run would lose more than ten minutes."""

    def __init__(self, options: TrainingOptions) -> None:
        self._ends = {*itertools.accumulate(stage.num_steps for stage in options.each_stage)}
        self._saved = self._began = time.monotonic()
        self._took = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin to count the time."""
        self._saved = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save if a stage ends or the time is up in any process."""
        self._began = time.monotonic()
        is_late = self._began - self._saved >= max(_SECONDS_BETWEEN, _RATIO * self._took)
        if largest_of_processes(is_late, args) or state.global_step in self._ends:
            control.should_save = True

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record the time of the save."""
        self._saved = time.monotonic()
        self._took = self._saved - self._began


@dataclasses.dataclass(frozen=True)
class Prepared:
    """Prepared inputs of a training run.

    Attributes:
        model: The model with a forward that returns the loss; with LoRA the adapter around it.
        arguments: The Trainer's arguments.
        options: The options, with epochs converted to steps.
        reports: Counts of the data of each stage.
        held_out: Counts of the evaluation data.
        measures: Sums of the loss by position, and the needle evaluation.
        inputs: Inputs that the model needs for its sequences.
        num_trained: Number of trained parameters.
        num_parameters: Number of all parameters.
        precision: The device, and the types of the computation.
    """

    model: Any
    arguments: Any
    options: TrainingOptions
    reports: tuple[DataReport, ...]
    held_out: DataReport | None
    measures: tuple[PositionLosses, NeedleProbe | None]
    inputs: ModelInputs
    num_trained: int
    num_parameters: int
    precision: Precision

    @property
    def report(self) -> DataReport:
        """Counts of the data of all stages."""
        return functools.reduce(operator.add, self.reports)


def train(prepared: Prepared, folder: Path, reporter: Reporter, last_save: Path | None) -> Trainer:
    """Train to the last step, from the beginning or from the last save; the losses are in `state.log_history`."""
    options, arguments = prepared.options, prepared.arguments
    held_out = None
    if prepared.held_out is not None:
        held_out = open_held_out(folder / HELD_OUT, options, prepared.held_out.num_sequences, prepared.inputs)
    live = LiveLine(reporter, options, folder / STEPS, *prepared.measures)
    places = zip(stage_folders(folder, options), options.each_stage, strict=True)
    data: Dataset[Tensors] = ConcatDataset([Sequences(place, stage, prepared.inputs) for place, stage in places])
    if options.sequence_parallel > 1:
        data = Parts(data, options.sequence_parallel)
    callbacks = [live, stop := StopAfterStep(), StageChange(options), MoreSaves(options)]
    trainer = OrderedTrainer(
        prepared.model, arguments, options, train_dataset=data, eval_dataset=held_out, callbacks=callbacks
    )
    if last_save:
        adapt_state(last_save, arguments)
    with stop, _explain_lost_process():
        trainer.train(resume_from_checkpoint=str(last_save) if last_save else None)
    atexit.register(_leave_processes)
    stop.check(is_complete=trainer.state.global_step >= trainer.state.max_steps)
    best = trainer.state.best_model_checkpoint
    if options.keep_best and best and reporter.notify is not None:
        reporter.notify(f"using step {Path(best).name.rsplit('-', 1)[1]}, the best: {trainer.state.best_metric:.3f}")
    return trainer


@contextmanager
def _explain_lost_process() -> Iterator[None]:
    """Report the end of another process in one line of the first process; the others exit silently."""
    try:
        yield
    except RuntimeError as error:
        # gloo raises a plain RuntimeError for a closed connection.
        if not (isinstance(error, torch.distributed.DistError) or (num_processes() > 1 and "gloo" in str(error))):
            raise
        if rank() != 0:
            raise SystemExit(1) from error
        raise CtxextError(
            "Another process of this training ended.",
            hint="The launcher reports which one. Continue under the same launcher with --resume.",
        ) from error


def _leave_processes() -> None:
    """Destroy a gloo process group before the interpreter ends.

    If one of its threads releases the last collective's tensors during interpreter shutdown, the process aborts
    (pytorch pull request 179291), and the launcher ends the first process, which still writes the checkpoint. A group
    with other references keeps its threads, hence the short sleep. NCCL groups must be destroyed by all processes at
    once, or not at all.
    """
    group = torch.distributed
    if group.is_available() and group.is_initialized() and group.get_backend() == "gloo":
        group.destroy_process_group()
        time.sleep(0.1)
