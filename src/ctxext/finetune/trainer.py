"""Training with transformers' Trainer: measurements, progress, logs and stopping."""

import atexit
import dataclasses
import difflib
import json
import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
from torch.utils.data import SequentialSampler

from ctxext.checkpoint.durations import format_duration
from ctxext.checkpoint.head import Head
from ctxext.data.encoding import Encoder
from ctxext.errors import CtxextError
from ctxext.evaluate.settings import Settings
from ctxext.evaluate.tasks.needle import Needle
from ctxext.evaluate.tasks.retrieval import check_fits, make_questions
from ctxext.files.offline import forbid_network
from ctxext.files.processes import Terminated, peak_memory, raise_terminated
from ctxext.finetune.batches import Reading, Sequences, collate
from ctxext.finetune.data import HELD_OUT, DataReport
from ctxext.finetune.loss import PositionLosses
from ctxext.finetune.models import Precision, choose_precision
from ctxext.finetune.options import Reporter, TrainingOptions
from ctxext.finetune.saves import adapt_state, clear_save

with forbid_network():
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments
    from transformers.training_args import OptimizerNames
    from transformers.utils import logging

STEPS = "steps.jsonl"
"""Log with one line per step: loss, learning rate, gradient norm, speed, memory."""


_NEEDLES = Settings(tasks=("needle",), samples=2)


class NeedleProbe:
    """Needle evaluation of a causal language model during training, with prompts of the target length.

    Its head uses the model's original forward, not the one that returns the loss.
    """

    def __init__(self, head: Head, tokenizer: Any, length: int, seed: int) -> None:
        self.head, self.length = head, length
        encoder, task = Encoder(tokenizer), Needle(num_needles=len(_NEEDLES.depths))
        check_fits(task, encoder, [length], _NEEDLES)
        numbers = range(seed * _NEEDLES.samples, (seed + 1) * _NEEDLES.samples)
        questions = make_questions(task, encoder, length, numbers, _NEEDLES)
        self.prompts = [prompt for question in questions for prompt in question]

    @torch.no_grad()
    def __call__(self) -> float:
        """Return the share of prompts with the right answer by greedy prediction."""
        return sum(map(self._is_answered, self.prompts)) / len(self.prompts)

    def _is_answered(self, prompt: Any) -> bool:
        ids = torch.tensor([prompt.ids], device=self.head.model.device)
        answer = slice(-prompt.num_answer - 1, -1)
        logits = self.head(self.head.read(ids)[:, answer], ids[:, answer])
        return bool((logits[0].argmax(-1) == ids[0, -prompt.num_answer :]).all())


class LiveLine(TrainerCallback):  # type: ignore[misc]
    """Callback that reports and logs each step and each evaluation, and raises if the loss is not finite.

    Args:
        reporter: Receives a line with the time left after each step, and a line per evaluation.
        tokens_per_step: Tokens of a step over all processes.
        path: Log file with a line per step and per evaluation.
        by_position: Sums of an evaluation's loss by position.
        needle: Needle evaluation; None if it is not possible.
    """

    def __init__(
        self,
        reporter: Reporter,
        tokens_per_step: int,
        path: Path,
        by_position: PositionLosses,
        needle: NeedleProbe | None = None,
    ) -> None:
        self.reporter, self.tokens_per_step, self.path = reporter, tokens_per_step, path
        self.by_position, self.needle = by_position, needle
        self.started, self.first_step = 0.0, 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the clock, and remove logged steps after the save that the run resumes from."""
        self.started, self.first_step = time.perf_counter(), state.global_step
        if state.is_world_process_zero:
            text = self.path.read_text(encoding="utf-8", errors="replace") if self.path.is_file() else ""
            lines = text.removeprefix("\ufeff").split("\n")
            earlier = [line for line in lines if _read_step(line) <= self.first_step]
            self.path.write_text("".join(f"{line}\n" for line in earlier), encoding="utf-8")

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Report and log a step; raise if its loss is not finite."""
        logs = logs or {}
        loss = logs.get("loss")
        if loss is None:
            return
        if not math.isfinite(loss):
            raise CtxextError(
                f"The loss is not finite at step {state.global_step}.", hint="Lower --learning-rate, or change --dtype."
            )
        if not state.is_world_process_zero:
            return
        seconds = max(time.perf_counter() - self.started, 1e-9)
        num_done = max(1, state.global_step - self.first_step)
        speed, memory = num_done * self.tokens_per_step / seconds, peak_memory(args.device)
        left = seconds / num_done * (state.max_steps - state.global_step)
        figures = {name: logs[name] for name in ("loss", "learning_rate", "grad_norm") if name in logs}
        line = {"step": state.global_step, **figures, "tokens_per_second": round(speed, 1), "memory": memory}
        self._write({**line, "seconds": round(seconds, 3)})
        if self.reporter.progress is not None:
            text = f"step {state.global_step} / {state.max_steps} · loss {loss:.3f} · {speed:,.0f} tokens/s · "
            text = f"{text}{memory / 2**30:.1f} GiB · {format_duration(left)} left"
            self.reporter.progress(text, state.global_step, state.max_steps)

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        """Run the needle evaluation, and report and log all results."""
        loss, parts = metrics["eval_loss"], self.by_position.take(args.device)
        results = {"step": state.global_step, "eval_loss": loss, "eval_loss_by_position": parts}
        formatted = ", ".join("–" if part is None else f"{part:.3f}" for part in parts)
        text = f"step {state.global_step}: loss {loss:.3f} on the evaluation data ({formatted} by position)"
        if self.needle is not None:
            results["needle"] = share = self.needle()
            text += f", {share:.0%} of {len(self.needle.prompts)} needles at {self.needle.length:,} tokens"
        if not state.is_world_process_zero:
            return
        self._write(results)
        if self.reporter.notify is not None:
            self.reporter.notify(text)

    def _write(self, line: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def _read_step(line: str) -> float:
    """Read the step of a log line; infinity for a line that is incomplete after a kill."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return math.inf
    return step if isinstance(step, int) else math.inf


class StopAfterStep(TrainerCallback):  # type: ignore[misc]
    """Context in which Ctrl-C and SIGTERM stop the training after the current sequences, with a save.

    If the step has more sequences, it is abandoned, as a grace period may be shorter than a step: the last complete
    step is saved, with its final random state, and a resumed run repeats the abandoned one.

    A second Ctrl-C ends it at once. A second SIGTERM has no effect: launchers forward the signal that the scheduler
    also sends to every process, and SIGKILL follows after the grace period.
    """

    def __init__(self) -> None:
        self.received = 0  # The signal that stops the training.
        self._before: dict[int, Any] = {}
        self._saved_step = 0
        self._random: dict[str, torch.Tensor] = {}

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        for number, replaceable in _REPLACEABLE.items():
            if signal.getsignal(number) in replaceable:
                self._before[number] = signal.signal(number, self._request_stop)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number in list(self._before):
            self._restore(number)

    def _request_stop(self, number: int, frame: FrameType | None) -> None:
        self.received = max(self.received, number)
        self._restore(signal.SIGINT)

    def _restore(self, number: int) -> None:
        if number in self._before:
            signal.signal(number, self._before.pop(number))

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record the step that the run resumes from: it is already saved."""
        self._saved_step = state.global_step

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep the random state, for a save of the step before."""
        self._random = {"cpu": torch.get_rng_state()}
        if args.device.type != "cpu":
            self._random["device"] = torch.get_device_module(args.device).get_rng_state()

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Abandon the step if a signal was received, and save the one before."""
        if not self._is_stopping(args):
            return
        torch.set_rng_state(self._random["cpu"])
        if "device" in self._random:
            torch.get_device_module(args.device).set_rng_state(self._random["device"])
        control.should_training_stop = True
        control.should_save = state.global_step > self._saved_step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save and stop if a signal was received."""
        if self._is_stopping(args):
            control.should_save = control.should_training_stop = True

    def _is_stopping(self, args: Any) -> bool:
        """Return whether any process received a signal: it may reach one before the others."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            received = torch.tensor(self.received, device=args.device)
            torch.distributed.all_reduce(received, op=torch.distributed.ReduceOp.MAX)
            self.received = int(received)
        return bool(self.received)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record the saved step."""
        self._saved_step = state.global_step

    def check(self, *, is_complete: bool) -> None:
        """Raise if the run was stopped; after SIGTERM there is no time for the work after the last step."""
        if self.received == signal.SIGTERM:
            raise Terminated
        if self.received and not is_complete:
            raise KeyboardInterrupt


_REPLACEABLE: dict[int, tuple[Any, ...]] = {
    signal.SIGINT: (signal.default_int_handler,),
    signal.SIGTERM: (signal.SIG_DFL, raise_terminated),
}
"""Signals and their replaceable handlers; other handlers belong to the calling program."""


class OrderedTrainer(Trainer):  # type: ignore[misc]
    """A Trainer that uses the sequences in the order of the data set."""

    def __init__(self, model: Any, arguments: TrainingArguments, **kwargs: Any) -> None:
        super().__init__(model, arguments, data_collator=collate, **kwargs)
        self.remove_callback(PrinterCallback)

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


def make_training_arguments(
    options: TrainingOptions, folder: Path, num_processes: int, *, is_evaluated: bool = False
) -> TrainingArguments:
    """Make the arguments of the Trainer; with several processes, this starts the process group."""
    if options.report_to != "none" and find_spec(options.report_to) is None:
        raise CtxextError(
            f"--report-to {options.report_to} needs a package that is not installed.",
            hint=f"pip install {options.report_to}",
        )
    name = options.optimizer
    known = [optimizer.value for optimizer in OptimizerNames]
    if name not in known:
        near = ", ".join(difflib.get_close_matches(name, known, n=3, cutoff=0.3))
        raise CtxextError(
            f'Unknown --optimizer "{name}".',
            hint=f"Did you mean {near}?" if near else f"Choose {', '.join(known)}.",
        )
    at_once = options.micro_batch * num_processes
    if options.batch_size % at_once:
        raise CtxextError(
            f"--batch-size {options.batch_size} cannot be split over {num_processes} processes with "
            f"{options.micro_batch} sequences each.",
            hint=f"Use a multiple of {at_once}.",
        )
    logging.set_verbosity_error()
    precision = choose_precision(options)
    kind = precision.device.type
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
        eval_strategy="steps" if is_evaluated else "no",
        eval_steps=options.save_every,
        load_best_model_at_end=is_evaluated and options.keep_best,
        per_device_eval_batch_size=1,
        prediction_loss_only=True,
        gradient_checkpointing=bool(options.checkpointing),
        gradient_checkpointing_kwargs={"use_reentrant": False},
        report_to=options.report_to,
        disable_tqdm=True,
        use_cpu=kind == "cpu",
        bf16=precision.autocast == "bf16",
        fp16=precision.autocast == "fp16",
        remove_unused_columns=False,
        dataloader_pin_memory=kind not in ("cpu", "mps"),
        ddp_find_unused_parameters=False,
        ddp_timeout=_PATIENCE,
    )


_PATIENCE = 24 * 3600
"""Seconds to wait for other processes: the first reads all data before the others start."""


def open_held_out(folder: Path, options: TrainingOptions, count: int, reading: Reading) -> Sequences:
    """Open the held-out sequences of the full length, each used once and in order."""
    once: dict[str, Any] = {"steps": count, "batch_size": 1, "micro_batch": 1, "short_share": 0.0, "start_length": None}
    return Sequences(folder, dataclasses.replace(options, **once), reading)


@dataclasses.dataclass(frozen=True)
class Prepared:
    """Prepared inputs of a training run.

    Attributes:
        model: The model with a forward that returns the loss; with LoRA the adapter around it.
        arguments: The Trainer's arguments.
        options: The options, with epochs converted to steps.
        report: Counts of the data.
        held_out: Counts of the evaluation data.
        measures: Sums of the loss by position, and the needle evaluation.
        reading: Inputs that the model needs for its sequences.
        num_trained: Number of trained parameters.
        num_parameters: Number of all parameters.
        precision: The device, and the types of the computation.
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
    precision: Precision


def train(ready: Prepared, folder: Path, reporter: Reporter, last_save: Path | None) -> Trainer:
    """Train to the last step, from the beginning or from the last save; the losses are in `state.log_history`."""
    options, arguments = ready.options, ready.arguments
    held_out = None
    if ready.held_out is not None:
        held_out = open_held_out(folder / HELD_OUT, options, ready.held_out.num_sequences, ready.reading)
    live = LiveLine(reporter, options.batch_size * options.sequence_length, folder / STEPS, *ready.measures)
    data, stop = Sequences(folder, options, ready.reading), StopAfterStep()
    trainer = OrderedTrainer(ready.model, arguments, train_dataset=data, eval_dataset=held_out, callbacks=[live, stop])
    if last_save:
        adapt_state(last_save, arguments)
    with stop:
        trainer.train(resume_from_checkpoint=str(last_save) if last_save else None)
    atexit.register(_leave_processes)
    stop.check(is_complete=trainer.state.global_step >= trainer.state.max_steps)
    best = trainer.state.best_model_checkpoint
    if options.keep_best and best and reporter.notify is not None:
        reporter.notify(f"using step {Path(best).name.rsplit('-', 1)[1]}, the best: {trainer.state.best_metric:.3f}")
    return trainer


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
