"""The arguments of transformers' Trainer, from the options of a training run."""

import difflib
from importlib.util import find_spec
from pathlib import Path

from ctxext.errors import CtxextError
from ctxext.files.offline import forbid_network
from ctxext.finetune.models import Precision
from ctxext.finetune.options import TrainingOptions

with forbid_network():
    from transformers import TrainingArguments
    from transformers.training_args import OptimizerNames
    from transformers.utils import logging

WITHOUT_OWN_MEMORY = ("cpu", "mps")
"""Types of devices that use the memory of the machine."""


def make_training_arguments(
    options: TrainingOptions, precision: Precision, folder: Path, num_processes: int, *, is_evaluated: bool = False
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
    size = options.sequence_parallel
    if num_processes > 1 and num_processes % size:
        raise CtxextError(
            f"--sequence-parallel {size} needs a multiple of {size} processes, not {num_processes}.",
            hint=f"Start them with: accelerate launch --num_processes {size} -m ctxext finetune …",
        )
    at_once = options.micro_batch * count_groups(options, num_processes)
    if options.batch_size % at_once:
        raise CtxextError(
            f"--batch-size {options.batch_size} cannot be split over {num_processes} processes with "
            f"{options.micro_batch} sequences each.",
            hint=f"Use a multiple of {at_once}.",
        )
    logging.set_verbosity_error()
    kind, first = precision.device.type, options.each_stage[0]
    schedule = "constant_with_warmup" if options.schedule == "constant" else options.schedule
    return TrainingArguments(
        output_dir=str(folder),
        max_steps=options.num_steps,
        per_device_train_batch_size=options.micro_batch,
        gradient_accumulation_steps=options.batch_size // at_once,
        learning_rate=options.peak_rate,
        # For logs: the learning rates are those of the options.
        lr_scheduler_type="cosine_with_min_lr" if first.rate_floor else schedule,
        warmup_steps=first.warmup_steps,
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
        gradient_checkpointing=any(stage.checkpointing for stage in options.each_stage),
        gradient_checkpointing_kwargs={"use_reentrant": False},
        report_to=options.report_to,
        disable_tqdm=True,
        use_cpu=kind == "cpu",
        bf16=precision.autocast == "bf16",
        fp16=precision.autocast == "fp16",
        remove_unused_columns=False,
        dataloader_pin_memory=kind not in WITHOUT_OWN_MEMORY,
        ddp_find_unused_parameters=False,
        ddp_timeout=_PATIENCE,
    )


def count_groups(options: TrainingOptions, num_processes: int) -> int:
    """Return the number of groups of processes that each work on other sequences.

    A single process has no others to share its sequences with: a dry run measures them whole.
    """
    return num_processes // options.sequence_parallel if num_processes > 1 else 1


_PATIENCE = 24 * 3600
"""Seconds to wait for other processes: the first reads all data before the others start."""
