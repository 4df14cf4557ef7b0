"""Estimates of the data, memory and time of a fine-tuning, from a few short steps."""

import dataclasses
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ctxext.files.processes import num_processes, rank, return_blocks, total_memory, wait_for
from ctxext.finetune.arguments import WITHOUT_OWN_MEMORY
from ctxext.finetune.base import open_model
from ctxext.finetune.data import DataReport
from ctxext.finetune.documents import DocumentReader
from ctxext.finetune.options import MASKED_SHARE, Reporter, TrainingOptions
from ctxext.finetune.prepare import count_tokens, prepare
from ctxext.finetune.step_costs import Cost, StepMeasurements, choose_lengths, measure_stages

_REMEDIES: tuple[tuple[Callable[[TrainingOptions], bool], str], ...] = (
    (lambda options: options.micro_batch > 1, "--micro-batch 1: one sequence at a time"),
    (lambda options: not options.checkpointing, "--checkpointing: recompute activations"),
    (lambda options: not options.low_memory, "--low-memory: feed-forward blocks in tiles"),
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
class StagePlan:
    """Estimated cost of a stage.

    Attributes:
        steps: Number of steps.
        length: Tokens of a sequence.
        peak_memory: Peak memory of a process in bytes.
        seconds_per_step: Duration of a step at the full length.
        seconds: Duration of all steps.
    """

    steps: int
    length: int
    peak_memory: int
    seconds_per_step: float
    seconds: float


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
        stages: The same for each stage.
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
    stages: "tuple[StagePlan, ...]"
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


def _plan_stage(stage: TrainingOptions, measured: StepMeasurements, cost: Cost, world: int) -> StagePlan:
    """Estimate the cost of a stage in some processes."""
    length, (per_step, seconds) = stage.sequence_length, measured.seconds_of(stage, cost, world)
    # A single process measured whole sequences.
    parts = stage.sequence_parallel if world == 1 else 1
    peak = measured.peak_at(-(-length // parts), cost)
    return StagePlan(stage.num_steps, length, peak, per_step / parts, seconds / parts)


def _available_memory(device: torch.device) -> int:
    """Return the bytes available to this process, including its present use."""
    import psutil

    if device.type not in WITHOUT_OWN_MEMORY:
        return total_memory(device)
    return int(psutil.virtual_memory().available + psutil.Process().memory_info().rss)


_PREFIX = "ctxext-dry-run-"


@contextmanager
def _temporary_folder() -> Iterator[Path]:
    """Create a folder that all processes of a launcher on this machine share; the first one deletes it at the end."""
    if num_processes() == 1:
        with tempfile.TemporaryDirectory(prefix=_PREFIX) as folder:
            yield Path(folder)
        return
    import psutil

    launcher, is_first = psutil.Process(os.getppid()), rank() == 0
    shared = Path(tempfile.gettempdir(), f"{_PREFIX}{launcher.pid}-{launcher.create_time():.0f}")
    if is_first:
        shared.mkdir(mode=0o700)
    wait_for(shared)
    try:
        yield shared
    finally:
        if is_first:
            shutil.rmtree(shared, ignore_errors=True)


def plan_training(
    model: str,
    read_stages: Sequence[DocumentReader],
    options: TrainingOptions,
    *,
    revision: str | None = None,
    token: str | None = None,
    merge: bool = True,
    reporter: Reporter | None = None,
) -> Plan:
    """Read the data, run a few short steps, and estimate the cost of the training; write nothing."""
    return_blocks()
    reporter = reporter or Reporter()
    base, options = open_model(model, options, revision, token)
    with _temporary_folder() as folder:
        base = base.convert(folder, options.original_length, reporter.progress)
        prepared = prepare(base, folder, read_stages, options, merge=merge, reporter=reporter)
        options = prepared.options
        num_tokens = sum(
            count_tokens(report, stage.sequence_length)
            for report, stage in zip(prepared.reports, options.each_stage, strict=True)
        )
        lengths = choose_lengths(options)
        masked_share = MASKED_SHARE if base.is_masked else 1.0
        cost = Cost(prepared.model, options, learned_share=masked_share * prepared.report.num_learned / num_tokens)
        reporter.report_stage(f"measuring two steps of {lengths[0]:,} tokens, then two of {lengths[1]:,}")
        world = prepared.arguments.world_size
        setup = {"inputs": prepared.inputs, "precision": prepared.precision, "world": world, "folder": folder}
        measured = measure_stages(prepared.model, options, lengths, cost, **setup)
    stages = tuple(
        _plan_stage(stage, steps, cost, world) for stage, steps in zip(options.each_stage, measured, strict=True)
    )
    return Plan(
        options,
        prepared.report,
        num_tokens,
        prepared.num_trained,
        prepared.num_parameters,
        max(stage.peak_memory for stage in stages),
        _available_memory(prepared.arguments.device),
        max(stage.seconds_per_step for stage in stages),
        math.fsum(stage.seconds for stage in stages),
        stages,
        lengths[1],
        prepared.precision.device.type,
        prepared.precision.dtype,
    )
