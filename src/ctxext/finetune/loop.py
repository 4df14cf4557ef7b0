"""The training itself: transformers' Trainer with the few things it lacks."""

import math
import resource
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import SequentialSampler
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.utils import logging

from ctxext.checkpoint import read_json_object
from ctxext.errors import CtxextError
from ctxext.files import Progress
from ctxext.finetune.batches import Sequences, stacked
from ctxext.finetune.options import TrainingOptions

STATE = "trainer_state.json"


class OrderedTrainer(Trainer):  # type: ignore[misc]
    """A Trainer that takes the sequences in the order in which the data set has them."""

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)


class LiveLine(TrainerCallback):  # type: ignore[misc]
    """Tells step, loss, speed and memory after every step, and stops where the loss is lost.

    Args:
        progress: Called with a text, steps done and steps in all.
        tokens_per_step: Tokens of a step over all processes.
    """

    def __init__(self, progress: Progress | None, tokens_per_step: int) -> None:
        self.progress, self.tokens_per_step = progress, tokens_per_step
        self.started, self.first_step = 0.0, 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the clock."""
        self.started, self.first_step = time.perf_counter(), state.global_step

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Show the line.

        Raises:
            CtxextError: the loss is no number any more.
        """
        loss = (logs or {}).get("loss")
        if loss is None:
            return
        if not math.isfinite(loss):
            raise CtxextError(
                f"The loss is not finite at step {state.global_step}.", hint="Lower --learning-rate, or use --dtype."
            )
        if self.progress is not None and state.is_world_process_zero:
            seconds = max(time.perf_counter() - self.started, 1e-9)
            speed = (state.global_step - self.first_step) * self.tokens_per_step / seconds
            text = f"loss {loss:.3f} · {speed:,.0f} tokens/s · {memory_in_use() / 2**30:.1f} GiB"
            self.progress(text, state.global_step, state.max_steps)


def memory_in_use() -> int:
    """Peak memory in bytes: the accelerator's where there is one, otherwise this process's."""
    if torch.cuda.is_available() and torch.cuda.max_memory_allocated():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def training_arguments(options: TrainingOptions, folder: Path, num_processes: int) -> TrainingArguments:
    """The Trainer's arguments. Making them starts the process group where there are several processes.

    Raises:
        CtxextError: the batch cannot be shared among the processes, or what is reported to is not installed.
    """
    if options.report_to != "none" and find_spec(options.report_to) is None:
        raise CtxextError(
            f"--report-to {options.report_to} needs a package that is not here.",
            hint=f"pip install {options.report_to}",
        )
    sharing = options.context_parallel
    if num_processes % sharing or (sharing > 1 and not torch.cuda.is_available()):
        raise CtxextError(
            f"--context-parallel {sharing} needs a multiple of {sharing} processes, each with an accelerator; "
            f"there are {num_processes} processes and {torch.cuda.device_count()} accelerators.",
            hint=f"accelerate launch --num_processes {sharing} --use_fsdp --fsdp_version 2 -m ctxext finetune ...",
        )
    at_once = options.micro_batch * num_processes // sharing
    if options.batch_size % at_once:
        raise CtxextError(
            f"--batch-size {options.batch_size} cannot be shared by {num_processes // sharing} processes with "
            f"{options.micro_batch} sequences at once.",
            hint=f"Use a multiple of {at_once}.",
        )
    logging.set_verbosity_error()
    on_cpu = options.device == "cpu" or not torch.cuda.is_available()
    return TrainingArguments(
        output_dir=str(folder),
        max_steps=options.steps,
        per_device_train_batch_size=options.micro_batch,
        gradient_accumulation_steps=options.batch_size // at_once,
        learning_rate=options.learning_rate,
        lr_scheduler_type="constant_with_warmup" if options.schedule == "constant" else options.schedule,
        warmup_steps=math.ceil(options.warmup * options.steps),
        weight_decay=0.0,
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
        **_parallelism(sharing, num_processes),
    )


def _parallelism(sharing: int, num_processes: int) -> dict[str, Any]:
    """How accelerate spreads a sequence over devices: ring attention, beside weights that FSDP2 shards."""
    if sharing == 1:
        return {}
    from accelerate import ParallelismConfig

    return {"parallelism_config": ParallelismConfig(cp_size=sharing, dp_shard_size=num_processes // sharing)}


def train(
    model: Any, arguments: TrainingArguments, data: Sequences, progress: Progress | None, last_save: Path | None
) -> Trainer:
    """Train to the last step, from the beginning or from where a run was saved.

    Args:
        model: The model, its forward returning the loss.
        arguments: From `training_arguments`.
        data: The sequences of every step.
        progress: Called with a text, steps done and steps in all.
        last_save: A folder from `newest_save`.

    Returns:
        The Trainer; the losses are in its `state.log_history`.
    """
    options = data.options
    if options.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    trainer = OrderedTrainer(model=model, args=arguments, train_dataset=data, data_collator=stacked)
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(LiveLine(progress, options.batch_size * options.sequence_length))
    trainer.train(resume_from_checkpoint=str(last_save) if last_save else None)
    return trainer


def newest_save(folder: Path) -> Path | None:
    """The newest save that was written to the end: the state is what the Trainer writes last."""
    saves = sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name.rsplit("-", 1)[1]), reverse=True)
    for save in saves:
        try:
            read_json_object(save / STATE)
        except CtxextError:
            continue
        return save
    return None
