"""Estimates of the data, memory and time of a fine-tuning, from a few short steps.

Steps at two short lengths are measured; memory and time at the full length are extrapolated.
"""

import contextlib
import ctypes
import dataclasses
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ctxext.checkpoint.durations import count_work, estimate_seconds
from ctxext.checkpoint.head import positions_at_once
from ctxext.files.offline import forbid_network
from ctxext.files.processes import forget_peak, peak_memory, total_memory
from ctxext.finetune.arguments import make_training_arguments
from ctxext.finetune.base import open_model
from ctxext.finetune.batches import Tensors
from ctxext.finetune.data import DataReport
from ctxext.finetune.documents import DocumentReader
from ctxext.finetune.loss import IGNORED
from ctxext.finetune.options import MASKED_SHARE, Reporter, TrainingOptions
from ctxext.finetune.prepare import count_tokens, prepare
from ctxext.finetune.trainer import OrderedTrainer, Prepared

with forbid_network():
    from transformers import TrainerCallback

_SHARE_MEASURED, _MOST_MEASURED = 4, 2048
_REMEDIES: tuple[tuple[Callable[[TrainingOptions], bool], str], ...] = (
    (lambda options: options.micro_batch > 1, "--micro-batch 1: one sequence at a time"),
    (lambda options: not options.checkpointing, "--checkpointing: recompute activations"),
    (lambda options: options.full, "LoRA instead of --full: less optimizer state"),
    (lambda options: not options.full and options.quantize == "none", "--quantize 4bit: frozen weights in 4 bits"),
    (
        lambda options: options.positions == "full" and options.pack != "restart",
        "--positions pose: short windows that skip positions",
    ),
    (lambda options: True, "--length: shorter sequences"),
)
"""Ways to reduce memory, most useful first, each with a check that it is still available."""


@dataclass(frozen=True)
class Plan:
    """Estimated cost of a fine-tuning.

    Attributes:
        options: The options, resolved.
        data: Counts of the data.
        num_tokens: Tokens in all sequences.
        num_trained: Number of trained parameters.
        num_parameters: Number of all parameters.
        peak_memory: Peak memory of a process in bytes, on the accelerator if there is one.
        available_memory: Available memory in bytes.
        seconds_per_step: Duration of a step at the full length.
        seconds: Duration of all steps.
        measured_length: Tokens of the longer measured sequences.
        device: Type of the device.
        dtype: Type of the computation.
    """

    options: TrainingOptions
    data: DataReport
    num_tokens: int
    num_trained: int
    num_parameters: int
    peak_memory: int
    available_memory: int
    seconds_per_step: float
    seconds: float
    measured_length: int
    device: str
    dtype: str

    @property
    def fits(self) -> bool:
        """Whether there is enough memory."""
        return self.peak_memory <= self.available_memory

    @property
    def remedies(self) -> list[str]:
        """Options that would lower the memory."""
        return [text for is_left, text in _REMEDIES if is_left(self.options)]

    def to_dict(self) -> dict[str, Any]:
        """Return the content of `--json`."""
        return {**dataclasses.asdict(self), "options": self.options.to_dict(), "fits": self.fits}


_STEPS = 2
"""Steps at each length: the first also creates the optimizer's state."""
_LOGIT_BYTES = 12
"""Bytes per logit during the loss of a piece: the logit, its score and its gradient."""
_MMAP_THRESHOLD, _BLOCK = -3, 1 << 20


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
        forget_peak(args.device)
        self.began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.device.type != "cpu":  # Accelerators run asynchronously.
            torch.get_device_module(args.device).synchronize()
        self.seconds.append(time.perf_counter() - self.began)
        self.peaks.append(peak_memory(args.device))


def _row(length: int, prepared: Prepared, cost: Cost) -> Tensors:
    """Create a random sequence."""
    ids = torch.randint(0, cost.vocabulary, (1, length))
    labels = ids.masked_fill(torch.rand(1, length) >= cost.learned_share, IGNORED)
    tensors = {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}
    if prepared.inputs.first_index is not None:
        # Use the last positions of a full sequence, to avoid special cases of short ones.
        first = prepared.inputs.first_index + prepared.options.sequence_length - length
        tensors["position_ids"] = torch.arange(first, first + length)[None]
    return tensors


def _measure(prepared: Prepared, lengths: tuple[int, int], cost: Cost, folder: Path) -> StepMeasurements:
    """Train a few steps on random sequences of two lengths; this changes the model's weights."""
    model, options, world = prepared.model, prepared.options, prepared.arguments.world_size
    device = prepared.arguments.device  # The Trainer moves the model there.
    before = peak_memory(device)
    if device.type == "cpu":
        _return_blocks()
    short_options = dataclasses.replace(
        options, steps=_STEPS * len(lengths), batch_size=options.micro_batch * world, report_to="none", save_every=10**9
    )
    arguments = make_training_arguments(short_options, prepared.precision, folder, world)
    arguments.save_strategy = "no"
    clock = _Clock()
    rows = [_row(length, prepared, cost) for length in lengths for _ in range(_STEPS * options.micro_batch)]
    OrderedTrainer(model, arguments, train_dataset=rows, callbacks=[clock]).train()
    return StepMeasurements(
        lengths, (max(clock.peaks[:_STEPS]), max(clock.peaks[_STEPS:])), before, min(clock.seconds[_STEPS:])
    )


def _return_blocks() -> None:
    """Make glibc return blocks of 1 MiB or more to the kernel, unless the environment sets MALLOC_ variables.

    By default glibc keeps freed blocks below the largest freed one, up to 32 MiB: at short lengths it keeps blocks that
    it returns at long ones.
    """
    if sys.platform == "linux" and not any(name.startswith("MALLOC_") for name in os.environ):
        with contextlib.suppress(AttributeError):  # Other C libraries have no mallopt.
            ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, _BLOCK)


def _available_memory(device: torch.device) -> int:
    """Return the bytes available to this process, including its present use."""
    import psutil

    if device.type not in ("cpu", "mps"):  # Those share the memory of the machine.
        return total_memory(device)
    return int(psutil.virtual_memory().available + psutil.Process().memory_info().rss)


def plan_training(
    model: str,
    read_documents: DocumentReader,
    options: TrainingOptions,
    *,
    revision: str | None = None,
    token: str | None = None,
    merge: bool = True,
    reporter: Reporter | None = None,
) -> Plan:
    """Read the data, run a few short steps, and estimate the cost of the training; write nothing."""
    reporter = reporter or Reporter()
    base, options = open_model(model, options, revision, token)
    with tempfile.TemporaryDirectory(prefix="ctxext-dry-run-") as folder:
        prepared = prepare(base, Path(folder), read_documents, options, merge=merge, reporter=reporter)
        options = prepared.options
        full = options.sequence_length
        num_tokens = count_tokens(prepared.report, full)
        longer = max(2, min(full // _SHARE_MEASURED, _MOST_MEASURED))
        masked_share = MASKED_SHARE if base.is_masked else 1.0
        cost = Cost(prepared.model, options, learned_share=masked_share * prepared.report.num_learned / num_tokens)
        reporter.report_stage(f"measuring two steps of {longer // 2:,} tokens, then two of {longer:,}")
        measured = _measure(prepared, (longer // 2, longer), cost, Path(folder))
    at_once = prepared.arguments.world_size * options.micro_batch
    rounds = math.ceil(options.batch_size / at_once)
    per_step = {
        length: rounds * estimate_seconds([length] * (full // length), (longer, measured.seconds), cost.work)
        for length in set(map(options.length_of_step, range(options.steps)))
    }
    return Plan(
        options,
        prepared.report,
        num_tokens,
        prepared.num_trained,
        prepared.num_parameters,
        measured.peak_at(full, cost),
        _available_memory(prepared.arguments.device),
        per_step.get(full, max(per_step.values())),
        sum(per_step[options.length_of_step(step)] for step in range(options.steps)),
        longer,
        prepared.precision.device.type,
        prepared.precision.dtype,
    )
