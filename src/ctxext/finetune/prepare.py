"""Everything before the first step: the model with its adapter, the Trainer's arguments, the sequences."""

import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ctxext.converters.output_directory import full_disk_told
from ctxext.errors import CtxextError
from ctxext.finetune.base import Base, load_base
from ctxext.finetune.data import DataReport, read_report, write_sequences
from ctxext.finetune.data_summary import data_lines
from ctxext.finetune.documents import DocumentReader
from ctxext.finetune.options import TrainingOptions
from ctxext.finetune.rewrite import stored_shapes
from ctxext.finetune.tensors import stored_name

if TYPE_CHECKING:
    from ctxext.finetune.batches import Reading
    from ctxext.finetune.evaluation import NeedleProbe, PositionLosses

HELD_OUT, _NUM_HELD_OUT = "held-out", 32


@dataclass(frozen=True)
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
        num_trained: Parameters that are trained.
        num_parameters: Parameters in all.
    """

    model: Any
    arguments: Any
    options: TrainingOptions
    report: DataReport
    held_out: DataReport | None
    measures: "tuple[PositionLosses, NeedleProbe | None]"
    reading: "Reading"
    num_trained: int
    num_parameters: int


def is_first() -> bool:
    """Whether this process is the one that writes and tells."""
    return os.environ.get("RANK", "0") == "0"


def prepare(
    base: Base,
    folder: Path,
    read_documents: DocumentReader,
    options: TrainingOptions,
    *,
    merge: bool,
    tell: Callable[[str], None] | None,
    read_held_out: DocumentReader | None = None,
) -> Prepared:
    """Load the model and read the data, unless an earlier run already wrote the sequences.

    Args:
        base: The checkpoint.
        folder: Where sequences lie and saves will.
        read_documents: Gives the documents.
        options: The options, settled.
        merge: Whether what is trained will be merged, so that it must have a place in the checkpoint.
        tell: Called with facts, one line each.
        read_held_out: Gives documents on which the loss is measured while training.

    Raises:
        CtxextError: the model, the data or an option is refused.
    """
    from ctxext.finetune.attention import register_shifted
    from ctxext.finetune.evaluation import PositionLosses, needle_probe
    from ctxext.finetune.loop import training_arguments, warmup_steps
    from ctxext.finetune.lora import count_parameters
    from ctxext.finetune.loss import use_chunked_loss
    from ctxext.finetune.source_model import load_source

    num_processes = int(os.environ.get("WORLD_SIZE", "1"))
    arguments = training_arguments(options, folder, num_processes)
    attention = register_shifted(options.group) if options.group else None
    model, tokenizer = load_base(base, options, attention)
    by_position = PositionLosses()
    source = load_source(base, model, options) if options.keep_short else None
    reading = _reading(base, model, tokenizer, options)
    own = use_chunked_loss(model, options.piece, source, by_position, is_masked=base.is_masked)
    torch_seed(options.seed)
    trained = model if options.full else _adapted(base, model, options)
    counts = count_parameters(trained)
    if merge and is_first():
        _check_mergeable(base, trained)
    with arguments.main_process_first(desc="reading the data"):
        report = read_report(folder)
        if report is None and is_first():
            report = _read(folder, read_documents, options.sequences_wanted(), options, tokenizer)
        if read_held_out is not None and read_report(folder / HELD_OUT) is None and is_first():
            (folder / HELD_OUT).mkdir(exist_ok=True)
            _read(folder / HELD_OUT, read_held_out, {options.sequence_length: _NUM_HELD_OUT}, options, tokenizer)
    assert report is not None, "the first process writes the sequences"
    options = options.for_data(report.num_sequences)
    arguments.max_steps, arguments.warmup_steps = options.steps, warmup_steps(options)
    if tell is not None:
        for line in data_lines(report, options):
            tell(line)
    held_out = read_report(folder / HELD_OUT)
    if held_out is not None and tell is not None:
        every = options.eval_every or options.save_every
        tell(f"evaluated on {held_out.num_sequences:,} sequences every {every:,} steps")
    assert options.length is not None, "the options are settled"
    can_answer = held_out is not None and not base.is_masked
    needle = needle_probe(model, own, tokenizer, options.length, options.seed, num_processes) if can_answer else None
    return Prepared(trained, arguments, options, report, held_out, (by_position, needle), reading, *counts)


def _adapted(base: Base, model: Any, options: TrainingOptions) -> Any:
    from ctxext.finetune.lora import with_adapter

    task = None if base.is_masked else "CAUSAL_LM"
    return with_adapter(model, options, whole=base.model.encoding.learned_tensors, task=task)


def _reading(base: Base, model: Any, tokenizer: Any, options: TrainingOptions) -> "Reading":
    """How the model takes its sequences; some families count positions by themselves.

    Raises:
        CtxextError: positions shall be skipped, and the model is told none.
    """
    from ctxext.finetune.batches import Reading
    from ctxext.finetune.masking import make_masker

    is_told = "position_ids" in inspect.signature(model.base_model.forward).parameters
    if not is_told and options.positions == "pose":
        raise CtxextError(
            f'"{base.model.family.model_type}" counts positions by itself, so that none can be skipped.',
            hint="Leave --positions pose out.",
        )
    mask = make_masker(tokenizer, options.mlm_probability) if base.is_masked else None
    return Reading(base.model.encoding.first_index if is_told else None, mask)


def torch_seed(seed: int) -> None:
    """Decide the initial weights of the adapter."""
    from transformers import set_seed

    set_seed(seed)


def _read(
    folder: Path, read_documents: DocumentReader, wanted: Mapping[int, int], options: TrainingOptions, tokenizer: Any
) -> DataReport:
    with full_disk_told(folder):
        documents = read_documents(tokenizer, wanted)
        return write_sequences(documents, folder, wanted=wanted, pack=options.pack, end=tokenizer.eos_token_id)


def _check_mergeable(base: Base, model: Any) -> None:
    """Before anything is trained: every trained weight must have a place in the checkpoint's files."""
    shapes = stored_shapes(base.checkpoint)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad or "lm_head" in name:
            continue
        owner = name.removeprefix("base_model.model.")
        for part in (".lora_", ".modules_to_save", ".base_layer"):
            owner = owner.split(part)[0] if part == ".lora_" else owner.replace(f"{part}.default", "").replace(part, "")
        owner = owner if owner.endswith((".weight", ".bias")) else f"{owner}.weight"
        if stored_name(owner, shapes) is None:
            raise CtxextError(
                f'"{owner}" cannot be merged: "{base.checkpoint.name}" stores it under another name.',
                hint="Keep the adapter apart with --no-merge.",
            )
