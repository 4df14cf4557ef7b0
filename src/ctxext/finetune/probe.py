"""Steps at two short lengths, from which memory and time at the full length follow."""

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import PrinterCallback, TrainerCallback

from ctxext.finetune.batches import Tensors
from ctxext.finetune.loop import OrderedTrainer, training_arguments
from ctxext.finetune.loss import IGNORED, positions_at_once
from ctxext.finetune.options import TrainingOptions
from ctxext.finetune.tiles import give_blocks_back
from ctxext.finetune.watch import memory_in_use

_STEPS = 2
"""Steps at each length: the first also makes the optimizer's state."""
_LOGIT_BYTES = 12
"""Bytes that a logit takes while its piece of the loss is computed: itself, its score and its gradient."""


class Cost:
    """What the known shapes say of a sequence's work and of its logits.

    Args:
        model: The model that is trained.
        options: The options, settled.
        learned_share: Share of the tokens that the loss counts.
    """

    def __init__(self, model: Any, options: TrainingOptions, learned_share: float) -> None:
        config = model.config.get_text_config(decoder=True)
        self.vocabulary, self.learned_share = int(config.vocab_size), learned_share
        self.rows, self.group = options.micro_batch, options.group
        self.width = int(config.num_hidden_layers * config.hidden_size)
        embedding = int(model.get_input_embeddings().weight.numel())
        num_linear = sum(weight.numel() for weight in model.parameters()) - embedding
        self.per_token = int(num_linear) + int(learned_share * embedding)
        self.piece = positions_at_once(model, model.device, options.piece)

    def work(self, length: int) -> float:
        """Multiplications of a sequence, up to a factor: through the weights, and causal attention."""
        return length * (self.per_token + self.width * min(length, self.group or length))

    def logit_bytes(self, length: int) -> int:
        """Memory of the logits that are there at once."""
        learned = int(self.rows * length * self.learned_share)
        return _LOGIT_BYTES * self.vocabulary * min(learned, self.piece)


@dataclass(frozen=True)
class Measured:
    """What two short lengths took.

    Attributes:
        lengths: Both, in tokens.
        peaks: Peak memory of each, in bytes.
        before: Peak memory before the first step, in bytes: loading takes more than training sometimes.
        seconds: Time of a step of one micro-batch at the second length.
        available: Memory there is, in bytes.
    """

    lengths: tuple[int, int]
    peaks: tuple[int, int]
    before: int
    seconds: float
    available: int

    def peak_at(self, length: int, cost: Cost) -> int:
        """Peak memory at another length: all but the logits grows with the tokens."""
        first, second = (peak - cost.logit_bytes(short) for peak, short in zip(self.peaks, self.lengths, strict=True))
        slope = max(0.0, (second - first) / (self.lengths[1] - self.lengths[0]))
        return max(self.before, int(second + slope * (length - self.lengths[1])) + cost.logit_bytes(length))


class _Rows(Dataset[Tensors]):
    """Random sequences, a few of each length."""

    def __init__(self, lengths: Sequence[int], options: TrainingOptions, cost: Cost, first_index: int | None) -> None:
        self.lengths = [length for length in lengths for _ in range(_STEPS * options.micro_batch)]
        self.options, self.cost, self.first_index = options, cost, first_index

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Tensors:
        length = self.lengths[index]
        ids = torch.randint(0, self.cost.vocabulary, (1, length))
        labels = ids.masked_fill(torch.rand(1, length) >= self.cost.learned_share, IGNORED)
        tensors = {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}
        if self.first_index is None:
            return tensors
        # The last positions of a full sequence: what only short ones do is not measured.
        first = self.first_index + self.options.sequence_length - length
        tensors["position_ids"] = torch.arange(first, first + length)[None]
        return tensors


class _Clock(TrainerCallback):  # type: ignore[misc]
    """Time and peak memory of every step."""

    def __init__(self) -> None:
        self.began, self.seconds, self.peaks = 0.0, [0.0][:0], [0][:0]

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the clock."""
        forget_peak()
        self.began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop it, when the accelerator is done too."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - self.began)
        self.peaks.append(peak_memory())


def measure(
    model: Any,
    options: TrainingOptions,
    lengths: tuple[int, int],
    cost: Cost,
    folder: Path,
    *,
    first_index: int | None = 0,
) -> Measured:
    """Train a few steps on random sequences; the model is not what it was afterwards.

    Args:
        model: The model that would be trained.
        options: The options, settled.
        lengths: Two lengths in tokens, the shorter first.
        cost: What its shapes say.
        folder: Where the Trainer may write.
        first_index: What `position_ids` call the first position; None where the model takes none.
    """
    before = memory_in_use()
    if model.device.type == "cpu":
        give_blocks_back()
    world = training_arguments(options, folder, 1).world_size
    short = dataclasses.replace(
        options, steps=_STEPS * len(lengths), batch_size=options.micro_batch * world, report_to="none", save_every=10**9
    )
    if options.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    arguments = training_arguments(short, folder, world)
    arguments.save_strategy = "no"
    clock = _Clock()
    rows = _Rows(lengths, short, cost, first_index)
    trainer = OrderedTrainer(options, model=model, args=arguments, train_dataset=rows)
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(clock)
    trainer.train()
    peaks = max(clock.peaks[:_STEPS]), max(clock.peaks[_STEPS:])
    return Measured(lengths, peaks, before, min(clock.seconds[_STEPS:]), available_memory())


def forget_peak() -> None:
    """Begin anew with the peak of this process's memory, where the system can."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    elif (path := Path("/proc/self/clear_refs")).exists():
        path.write_text("5")


def peak_memory() -> int:
    """Peak memory in bytes since it was forgotten; where the system cannot forget, since the beginning."""
    if torch.cuda.is_available() or not Path("/proc/self/status").exists():
        return memory_in_use()
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024


def available_memory() -> int:
    """Bytes that this process could take, those that it has included."""
    import psutil

    if torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(0).total_memory)
    return int(psutil.virtual_memory().available + psutil.Process().memory_info().rss)
