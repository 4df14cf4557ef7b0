"""Measurement of a few training steps, from which memory and time at other lengths are estimated.

Steps at two short lengths are measured.
"""

import dataclasses
import gc
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ctxext.checkpoint.durations import count_work, estimate_seconds
from ctxext.checkpoint.head import positions_at_once
from ctxext.files.offline import forbid_network
from ctxext.files.processes import forget_peak, peak_memory, trim_heap
from ctxext.finetune.arguments import count_groups, make_training_arguments
from ctxext.finetune.batches import ModelInputs, Parts, Tensors
from ctxext.finetune.loss import IGNORED
from ctxext.finetune.models import Precision
from ctxext.finetune.options import TrainingOptions
from ctxext.finetune.trainer import OrderedTrainer

with forbid_network():
    from transformers import TrainerCallback

_SHARE_MEASURED, _MOST_MEASURED = 2, 2048
"""The longer measured sequences are this part of the full length, at most so many tokens."""
_STEPS = 2
"""Steps at each length: the first also creates the optimizer's state."""
_LOGIT_BYTES = 12
"""Bytes per logit during the loss of a piece: the logit, its score and its gradient."""
_MINUTE = 60


class Cost:
    """Work and logit memory of a sequence, computed from shapes, if the loss counts a share of its tokens.

    Attributes:
        per_token: Multiplications of a token with weights.
        even: Length of a sequence for which causal attention has as many multiplications.
    """

    def __init__(self, model: Any, options: TrainingOptions, learned_share: float) -> None:
        config = model.config.get_text_config(decoder=True)
        self.vocabulary, self.learned_share = int(config.vocab_size), learned_share
        self.rows = options.micro_batch
        embedding = int(model.get_input_embeddings().weight.numel())
        num_linear = sum(weight.numel() for weight in model.parameters()) - embedding
        self.per_token = int(num_linear) + int(learned_share * embedding)
        self.even = self.per_token / (config.num_hidden_layers * config.hidden_size)
        self.piece = positions_at_once(model, options.piece)

    def work(self, length: int) -> float:
        """Return the work of a sequence, in units of a token without attention."""
        return count_work(length, self.even)

    def logit_bytes(self, length: int) -> int:
        """Return the memory, in bytes, of the logits that exist at once."""
        learned = int(self.rows * length * self.learned_share)
        return _LOGIT_BYTES * self.vocabulary * min(learned, self.piece)


@dataclass(frozen=True)
class StepMeasurements:
    """Measurements at two short lengths, in tokens: peak memory, in bytes.

    Attributes:
        before: Peak memory before the first step: loading sometimes takes more than training.
        seconds: Time of a step of one micro-batch at the second length.
    """

    lengths: tuple[int, int]
    peaks: tuple[int, int]
    before: int
    seconds: float

    def seconds_of(self, stage: TrainingOptions, cost: Cost, world: int) -> tuple[float, float]:
        """Estimate the time of a stage in some processes: of a step at the full length, and of all steps."""
        at_once = stage.micro_batch * count_groups(stage, world)
        full, rounds = stage.sequence_length, math.ceil(stage.batch_size / at_once)
        lengths = [stage.length_of_step(step) for step in range(stage.num_steps)]
        per_step = {
            length: rounds * estimate_seconds([length] * (full // length), (self.lengths[1], self.seconds), cost.work)
            for length in {*lengths, full}
        }
        return per_step[full], math.fsum(map(per_step.__getitem__, lengths))

    def peak_at(self, length: int, cost: Cost) -> int:
        """Estimate the peak memory at another length: all memory except the logits grows linearly with the tokens."""
        first, second = (peak - cost.logit_bytes(size) for peak, size in zip(self.peaks, self.lengths, strict=True))
        slope = max(0.0, (second - first) / (self.lengths[1] - self.lengths[0]))
        return max(self.before, int(second + slope * (length - self.lengths[1])) + cost.logit_bytes(length))


class _Clock(TrainerCallback):  # type: ignore[misc]
    """Callback that records the time and peak memory of every step."""

    def __init__(self) -> None:
        self.began = 0.0
        self.seconds: list[float] = []
        self.peaks: list[int] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # Memory that loading and earlier steps freed would hide what this step needs.
        gc.collect()
        trim_heap()
        forget_peak(args.device)
        self.began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.device.type != "cpu":  # Accelerators run asynchronously.
            torch.get_device_module(args.device).synchronize()
        self.seconds.append(time.perf_counter() - self.began)
        self.peaks.append(peak_memory(args.device))


def _row(length: int, full: int, inputs: ModelInputs, cost: Cost) -> Tensors:
    """Create a random sequence at the end of one of `full` tokens."""
    ids = torch.randint(0, cost.vocabulary, (1, length))
    labels = ids.masked_fill(torch.rand(1, length) >= cost.learned_share, IGNORED)
    tensors = {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}
    if inputs.first_index is not None:
        # Use the last positions of a full sequence, to avoid special cases of short ones.
        first = inputs.first_index + full - length
        tensors["position_ids"] = torch.arange(first, first + length)[None]
    return tensors


def choose_lengths(options: TrainingOptions) -> tuple[int, int]:
    """Return the two lengths to measure, in tokens."""
    longer = max(2, min(options.sequence_length // _SHARE_MEASURED, _MOST_MEASURED))
    return longer // 2, longer


def measure_steps(
    model: Any,
    stage: TrainingOptions,
    lengths: tuple[int, int],
    cost: Cost,
    *,
    inputs: ModelInputs,
    precision: Precision,
    world: int,
    folder: Path,
) -> StepMeasurements:
    """Train a few steps of a stage on random sequences of two lengths; this changes the trained weights.

    Args:
        model: The model with a forward that returns the loss.
        stage: The options of the stage, resolved.
        lengths: The lengths in tokens, the shorter one first.
        cost: The work and the logits of a sequence.
        inputs: Inputs that the model needs.
        precision: The device and the types of the computation.
        world: The number of processes.
        folder: A folder for the Trainer, which writes nothing into it.
    """
    short_options = dataclasses.replace(
        stage,
        steps=_STEPS * len(lengths),
        batch_size=stage.micro_batch * count_groups(stage, world),
        report_to="none",
        save_every=10**9,
    )
    arguments = make_training_arguments(short_options, precision, folder, world)
    arguments.save_strategy = "no"
    before = peak_memory(arguments.device)  # The Trainer moves the model there.
    if not stage.checkpointing:  # An earlier stage may have begun it.
        model.gradient_checkpointing_disable()
    clock = _Clock()
    full, times = stage.sequence_length, range(_STEPS * short_options.batch_size)
    rows: Any = [_row(length, full, inputs, cost) for length in lengths for _ in times]
    if world > 1 and stage.sequence_parallel > 1:
        rows = Parts(rows, stage.sequence_parallel)
    OrderedTrainer(model, arguments, short_options, train_dataset=rows, callbacks=[clock]).train()
    return StepMeasurements(
        lengths, (max(clock.peaks[:_STEPS]), max(clock.peaks[_STEPS:])), before, min(clock.seconds[_STEPS:])
    )


def measure_stages(
    model: Any, options: TrainingOptions, lengths: tuple[int, int], cost: Cost, **setup: Any
) -> list[StepMeasurements]:
    """Measure the steps of each stage by `measure_steps`; stages that differ only in tokens or rates share theirs."""
    alike = {stage.checkpointing: stage for stage in options.each_stage}
    measured = {kind: measure_steps(model, stage, lengths, cost, **setup) for kind, stage in alike.items()}
    return [measured[stage.checkpointing] for stage in options.each_stage]


def fit_steps(options: TrainingOptions, model: Any, minutes: float, **setup: Any) -> int:
    """Return the number of steps that fit into some minutes, at least one of each stage; the model is not changed.

    Args:
        options: The options, resolved; the steps of their stages keep their proportion.
        model: The model with a forward that returns the loss.
        minutes: The time of the training.
        setup: The other arguments of `measure_steps`.
    """
    # On the CPU: with --full these are all weights, and an accelerator may be almost full.
    saved = {name: weight.detach().cpu().clone() for name, weight in model.named_parameters() if weight.requires_grad}
    cost = Cost(model, options, learned_share=1.0)
    measured = measure_stages(model, options, choose_lengths(options), cost, **setup)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name in saved:
                weight.copy_(saved[name])
                weight.grad = None
    stages = zip(options.each_stage, measured, strict=True)
    seconds = math.fsum(steps.seconds_of(stage, cost, setup["world"])[1] for stage, steps in stages)
    return max(len(options.each_stage), int(options.num_steps * _MINUTE * minutes / seconds))
