"""What a fine-tune would take, before it is begun: its data as it is cut, memory and time from a few short steps."""

import dataclasses
import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ctxext.errors import CtxextError
from ctxext.finetune.base import open_base
from ctxext.finetune.data import DataReport
from ctxext.finetune.documents import DocumentReader
from ctxext.finetune.options import TrainingOptions
from ctxext.finetune.prepare import check_fits, num_tokens_of, prepare
from ctxext.finetune.served import served_with


def _goes(options: TrainingOptions, **changes: Any) -> bool:
    """Whether the options allow a change."""
    try:
        dataclasses.replace(options, **changes)
    except CtxextError:
        return False
    return True


_SHARE_MEASURED, _MOST_MEASURED = 4, 2048
_REMEDIES: tuple[tuple[Callable[[TrainingOptions], bool], str], ...] = (
    (lambda options: options.micro_batch > 1, "--micro-batch 1: one sequence at once"),
    (lambda options: not options.checkpointing, "--checkpointing: activations are computed twice"),
    (lambda options: options.mlp_tile is None, "--mlp-tile 1k: feed-forward parts 1,024 tokens at once"),
    (
        lambda options: not options.offload_activations,
        "--offload-activations: on an accelerator, what checkpointing keeps waits in the machine's memory",
    ),
    (lambda options: options.full, "LoRA, without --full: no optimizer state for all weights"),
    (lambda options: not options.full and options.quantize == "none", "--quantize 4bit: frozen weights in 4 bits"),
    (
        lambda options: options.positions == "full" and _goes(options, positions="pose"),
        "--positions pose: short windows that skip positions",
    ),
    (lambda options: True, "--length: shorter sequences"),
    (
        lambda options: options.context_parallel == 1 and _goes(options, context_parallel=2),
        "--context-parallel: several accelerators share a sequence",
    ),
)
"""What lowers the memory, in the order in which it is worth trying, each with whether it is left to try."""


@dataclass(frozen=True)
class Plan:
    """What a fine-tune would take.

    Attributes:
        options: The options, settled.
        data: What was read.
        num_tokens: Tokens in all sequences.
        num_trained: Parameters that would be trained.
        num_parameters: Parameters in all.
        peak_memory: Bytes that one process would take at its peak: of the accelerator's memory, if there is one.
        available_memory: Bytes that there are.
        seconds_per_step: Time of a step at the full length.
        seconds: Time of all steps.
        measured_length: Tokens of the sequences that were measured.
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

    @property
    def fits(self) -> bool:
        """Whether there is enough memory."""
        return self.peak_memory <= self.available_memory

    @property
    def remedies(self) -> list[str]:
        """What would lower the memory."""
        return [text for is_left, text in _REMEDIES if is_left(self.options)]

    def to_dict(self) -> dict[str, Any]:
        """As `--json` has it."""
        return {**dataclasses.asdict(self), "options": self.options.to_dict(), "fits": self.fits}


def dry_run(
    model: str,
    read_documents: DocumentReader,
    options: TrainingOptions,
    *,
    revision: str | None = None,
    token: str | None = None,
    merge: bool = True,
    tell: Callable[[str], None] | None = None,
) -> Plan:
    """Read the data, run a few short steps, and say what the whole would take; nothing is kept.

    Args:
        model: A folder, a Hub id, or `demo`.
        read_documents: Gives the documents.
        options: How to train.
        revision: A branch, tag or commit on the Hub.
        token: A Hub token.
        merge: Whether what is trained would be merged.
        tell: Called with facts, one line each.
    """
    from ctxext.finetune.probe import Cost, measure

    base = open_base(model, options.length, revision=revision, token=token, original_length=options.original_length)
    check_fits(base, options)
    served_with(base, options.serve_factor)
    encoding = base.model.encoding
    options = options.settled(window=encoding.context_length, trained_length=encoding.trained_length)
    with tempfile.TemporaryDirectory(prefix="ctxext-dry-run-") as folder:
        ready = prepare(base, Path(folder), read_documents, options, merge=merge, tell=tell)
        options = ready.options
        num_tokens = num_tokens_of(ready.report, options)
        full = options.sequence_length
        longer = max(2, min(full // _SHARE_MEASURED, _MOST_MEASURED))
        guessed = options.mlm_probability if base.is_masked else 1.0
        cost = Cost(ready.model, options, learned_share=guessed * ready.report.num_learned / num_tokens)
        first = ready.reading.first_index
        if tell:
            tell(f"measuring: two steps of {longer // 2:,} tokens, then two of {longer:,}")
        measured = measure(ready.model, options, (longer // 2, longer), cost, Path(folder), first_index=first)
    at_once = ready.arguments.world_size * options.micro_batch // options.context_parallel
    rounds = math.ceil(options.batch_size / at_once)
    per_step = {
        length: rounds * measured.seconds * (full // length) * cost.work(length) / cost.work(longer)
        for length in set(map(options.length_of_step, range(options.steps)))
    }
    return Plan(
        options,
        ready.report,
        num_tokens,
        ready.num_trained,
        ready.num_parameters,
        measured.peak_at(full, cost),
        measured.available,
        per_step.get(full, max(per_step.values())),
        sum(per_step[options.length_of_step(step)] for step in range(options.steps)),
        longer,
    )
