"""The training itself: transformers' Trainer with the few things it lacks."""

import atexit
import dataclasses
import difflib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import SequentialSampler
from transformers import PrinterCallback, Trainer, TrainerState, TrainingArguments
from transformers.trainer_utils import IntervalStrategy
from transformers.training_args import OptimizerNames
from transformers.utils import logging

from ctxext.errors import CtxextError
from ctxext.files.content import as_json
from ctxext.files.schemas import read_json_object
from ctxext.finetune.batches import Reading, Sequences, stacked
from ctxext.finetune.data import HELD_OUT, DataReport
from ctxext.finetune.options import Reporter, TrainingOptions
from ctxext.finetune.watch import STEPS, LiveLine, NeedleProbe, PositionLosses, StopAfterStep

STATE = "trainer_state.json"


class OrderedTrainer(Trainer):  # type: ignore[misc]
    """A Trainer that takes the sequences in the order in which the data set has them."""

    def __init__(self, options: TrainingOptions, model: Any, **kwargs: Any) -> None:
        if options.checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        super().__init__(model, data_collator=stacked, **kwargs)
        self.remove_callback(PrinterCallback)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, *args: Any, **kwargs: Any) -> None:
        with _explained(resume_from_checkpoint, "weights"):
            super()._load_from_checkpoint(resume_from_checkpoint, *args, **kwargs)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with _explained(checkpoint, "optimizer and schedule"):
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        with _explained(checkpoint, "random state"):
            super()._load_rng_state(checkpoint)

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)


@contextmanager
def _explained(save: str | None, what: str) -> Iterator[None]:
    """Report a save that cannot be read in one line."""
    try:
        yield
    except (CtxextError, MemoryError, torch.cuda.OutOfMemoryError):
        raise
    except Exception as error:
        if save is None:
            raise
        # torch's own message recommends to run what the file contains.
        raise CtxextError(
            f'"{save}" is damaged, its {what} cannot be loaded ({type(error).__name__}).',
            hint="Remove that folder to resume from an earlier save, or start again with --overwrite.",
        ) from error


def training_arguments(options: TrainingOptions, folder: Path, num_processes: int) -> TrainingArguments:
    """The Trainer's arguments. Making them starts the process group where there are several processes."""
    if options.report_to != "none" and find_spec(options.report_to) is None:
        raise CtxextError(
            f"--report-to {options.report_to} needs a package that is not here.",
            hint=f"pip install {options.report_to}",
        )
    name = options.optimizer
    known = [optimizer.value for optimizer in OptimizerNames]
    if name not in known:
        near = ", ".join(difflib.get_close_matches(name, known, n=3, cutoff=0.3))
        raise CtxextError(
            f'--optimizer "{name}" is not known.',
            hint=f"Did you mean {near}?" if near else f"Choose {', '.join(known)}.",
        )
    at_once = options.micro_batch * num_processes
    if options.batch_size % at_once:
        raise CtxextError(
            f"--batch-size {options.batch_size} cannot be shared by {num_processes} processes with "
            f"{options.micro_batch} sequences at once.",
            hint=f"Use a multiple of {at_once}.",
        )
    logging.set_verbosity_error()
    on_cpu = options.device == "cpu" or not torch.cuda.is_available()
    schedule = "constant_with_warmup" if options.schedule == "constant" else options.schedule
    if options.rate_floor:
        schedule = "cosine_with_min_lr"
    return TrainingArguments(
        output_dir=str(folder),
        max_steps=options.steps,
        per_device_train_batch_size=options.micro_batch,
        gradient_accumulation_steps=options.batch_size // at_once,
        learning_rate=options.learning_rate,
        lr_scheduler_type=schedule,
        **({"lr_scheduler_kwargs": {"min_lr_rate": options.rate_floor}} if options.rate_floor else {}),
        warmup_steps=options.warmup_steps,
        optim=options.optimizer,
        weight_decay=options.weight_decay,
        adam_beta2=options.beta2,
        seed=options.seed,
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_steps=options.save_every,
        save_total_limit=2,
        report_to=options.report_to,
        disable_tqdm=True,
        use_cpu=on_cpu,
        bf16=not on_cpu and options.dtype in ("auto", "bf16") and torch.cuda.is_bf16_supported(),
        fp16=not on_cpu and options.dtype == "fp16",
        remove_unused_columns=False,
        dataloader_pin_memory=not on_cpu,
        ddp_find_unused_parameters=False,
        ddp_timeout=_PATIENCE,
    )


_PATIENCE = 24 * 3600
"""Seconds that a process waits for the others: the first reads all the data before they begin."""


def held_out_sequences(folder: Path, options: TrainingOptions, count: int, reading: Reading) -> Sequences:
    """Sequences of the full length, each once and in order, to measure on."""
    once: dict[str, Any] = {"steps": count, "batch_size": 1, "micro_batch": 1, "short_share": 0.0, "start_length": None}
    return Sequences(folder, dataclasses.replace(options, **once), reading)


@dataclasses.dataclass(frozen=True)
class Prepared:
    """What a training begins with.

    Attributes:
        model: The model, its forward returning the loss; with LoRA the adapter around it.
        arguments: The Trainer's.
        options: The options, with the steps that epochs come to.
        report: What was read.
        held_out: What was read to measure the loss on while training.
        measures: What adds up its loss by position, and what asks for needles.
        reading: How it takes its sequences.
    """

    model: Any
    arguments: Any
    options: TrainingOptions
    report: DataReport
    held_out: DataReport | None
    measures: tuple[PositionLosses, NeedleProbe | None]
    reading: Reading
    num_trained: int
    num_parameters: int


def train(ready: Prepared, folder: Path, reporter: Reporter, last_save: Path | None) -> Trainer:
    """Train to the last step, from the beginning or from the last save; the losses are in `state.log_history`."""
    options, arguments = ready.options, ready.arguments
    data = Sequences(folder, options, ready.reading)
    held_out = None
    if ready.held_out is not None:
        held_out = held_out_sequences(folder / HELD_OUT, options, ready.held_out.num_sequences, ready.reading)
        arguments.eval_strategy = IntervalStrategy.STEPS
        arguments.eval_steps = options.save_every
        if options.keep_best:
            arguments.load_best_model_at_end = True
            arguments.metric_for_best_model, arguments.greater_is_better = "eval_loss", False
        arguments.per_device_eval_batch_size, arguments.prediction_loss_only = 1, True
    trainer = OrderedTrainer(options, ready.model, args=arguments, train_dataset=data, eval_dataset=held_out)
    tokens_per_step = options.batch_size * options.sequence_length
    trainer.add_callback(LiveLine(reporter, tokens_per_step, folder / STEPS, *ready.measures))
    stop = StopAfterStep()
    trainer.add_callback(stop)
    if last_save:
        _take_over(last_save / STATE, arguments)
    with stop:
        trainer.train(resume_from_checkpoint=str(last_save) if last_save else None)
    atexit.register(_leave_processes)
    stop.check(is_complete=trainer.state.global_step >= trainer.state.max_steps)
    best = trainer.state.best_model_checkpoint
    if options.keep_best and best and reporter.tell is not None:
        reporter.tell(f"kept step {Path(best).name.rsplit('-', 1)[1]}, the best: {trainer.state.best_metric:.3f}")
    return trainer


def _leave_processes() -> None:
    """Leave a group of gloo's before the interpreter ends.

    A thread of it that lets go of the last collective's tensors when the interpreter is ending aborts the process
    (pytorch pull request 179291), and the launcher then ends the first one, which still writes the checkpoint. A group
    that something else refers to keeps its threads, so they get a moment. NCCL's groups are left by all at once, or not
    at all.
    """
    group = torch.distributed
    if group.is_available() and group.is_initialized() and group.get_backend() == "gloo":
        group.destroy_process_group()
        time.sleep(0.1)


def _take_over(state: Path, arguments: TrainingArguments) -> None:
    """Note this run's micro-batch in the save it goes on from: transformers 4 would take the old one."""
    with arguments.main_process_first(local=False):
        content = read_json_object(state)
        if content.get("train_batch_size") != arguments.train_batch_size:
            new = state.with_name(f"{state.name}.new")
            new.write_text(as_json({**content, "train_batch_size": arguments.train_batch_size}), encoding="utf-8")
            new.replace(state)


def newest_save(folder: Path, steps: int) -> Path | None:
    """The newest save from which a run of so many steps can go on; the Trainer writes its state last."""
    known = {field.name for field in dataclasses.fields(TrainerState)}
    saves = {int(path.name.rsplit("-", 1)[1]): path for path in folder.glob("checkpoint-*")}
    later = 0
    for step, save in sorted(saves.items(), reverse=True):
        try:
            state = read_json_object(save / STATE)
        except CtxextError:
            continue
        if state.keys() <= known and state["global_step"] == step:
            if step <= steps:
                return save
            later = step
    if later:
        raise CtxextError(
            f"The run has {later} steps behind it, and --steps is {steps}.",
            hint="Give as many or more, or start again with --overwrite.",
        )
    return None
