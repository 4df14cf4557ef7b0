"""Preparation of a training run: model and adapter, arguments of the Trainer, sequences."""

import contextlib
import dataclasses
import difflib
import functools
import inspect
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ctxext.checkpoint.head import base_of, gather_weights
from ctxext.errors import CtxextError
from ctxext.files.content import as_json
from ctxext.files.offline import forbid_network
from ctxext.files.output_directory import explain_disk_errors, write_whole
from ctxext.files.processes import num_processes, rank, wait_for
from ctxext.files.schemas import read_json_object
from ctxext.finetune.arguments import WITHOUT_OWN_MEMORY, make_training_arguments
from ctxext.finetune.attention import attends_by_document, can_separate_documents
from ctxext.finetune.base import Base, check_fits
from ctxext.finetune.batches import ModelInputs, make_masker
from ctxext.finetune.data import HELD_OUT, DataReport, read_report, stage_folders, write_sequences
from ctxext.finetune.documents import DocumentReader, Documents
from ctxext.finetune.loss import PositionLosses, use_chunked_loss
from ctxext.finetune.models import choose_precision, load_base, load_source
from ctxext.finetune.needle_probe import NeedleProbe
from ctxext.finetune.options import MASKED_SHARE, Reporter, TrainingOptions
from ctxext.finetune.parallel import can_split, split_attention
from ctxext.finetune.step_costs import fit_steps
from ctxext.finetune.tiles import tile_blocks
from ctxext.finetune.trainer import Prepared
from ctxext.merge.tensors import add_shares, check_type, find_shares, find_stored_name, read_shapes
from ctxext.recipes.encodings.learned import tensors_named
from ctxext.report.findings import format_count

with forbid_network():
    from peft import LoraConfig, get_peft_model
    from transformers import set_seed
    from transformers.pytorch_utils import Conv1D


def add_adapter(model: Any, options: TrainingOptions, whole: Sequence[str] = (), task: str | None = "CAUSAL_LM") -> Any:
    """Add a LoRA adapter to the linear layers of a model; all other weights are frozen.

    Args:
        model: A transformers language model.
        options: The options.
        whole: Name endings of fully trained weights, such as a position table.
        task: peft's name of the model's task. Without it, an adapter of a base with custom code cannot be loaded
            again; peft has no name for masked language models.
    """
    modules, embedding, head = list(model.named_modules()), model.get_input_embeddings(), model.get_output_embeddings()
    # All linear layers except the output head; GPT-2's layers are convolutions. Routers that are linear layers return
    # two tensors, which peft's layers do not.
    linear = [
        name
        for name, module in modules
        if isinstance(module, (torch.nn.Linear, Conv1D))
        and module is not head
        and "Router" not in type(module).__name__
    ]
    leaves = sorted({name.rsplit(".", 1)[-1] for name in linear})
    for target in options.targets:
        # peft matches the ends of full names.
        if not any(name == target or name.endswith(f".{target}") for name in linear):
            near = difflib.get_close_matches(target, leaves, n=1)
            suggestion = f'Did you mean "{near[0]}"? ' if near else ""
            raise CtxextError(
                f'--targets "{target}" matches no linear layer of this model.',
                hint=f"{suggestion}The model has {', '.join(leaves)}.",
            )
    # Select norms by class: their names differ between families.
    saved_modules = [name for name, module in modules if options.train_norms and "Norm" in type(module).__name__]
    saved_modules += [name for name, module in modules if options.train_embeddings and module is embedding]
    weights = [name for name, _ in model.named_parameters()]
    saved_modules += [name.removesuffix(".weight") for ending in whole for name in tensors_named(weights, ending)]
    is_tied = bool(getattr(model.config.get_text_config(decoder=True), "tie_word_embeddings", False))
    config = LoraConfig(
        task_type=task,
        r=options.rank,
        lora_alpha=options.alpha,
        lora_dropout=options.dropout,
        target_modules=list(options.targets) or linear,
        # All of GPT-2's layers store their weights transposed.
        fan_in_fan_out=any(isinstance(module, Conv1D) for _, module in modules),
        modules_to_save=saved_modules or None,
        ensure_weight_tying=options.train_embeddings and is_tied,
    )
    return get_peft_model(model, config)


PLANNED = "planned.json"
"""File of the number of steps that a run was given by the measured time of a step."""
_FEW = 0.1
"""Share of the used documents below which a hint is shown."""
_WASTE = 0.1
"""Share of padding, or of dropped tokens, above which packing is suggested."""
_NUM_HELD_OUT = 32


def format_data_lines(report: DataReport, options: TrainingOptions, joining: str = "restart") -> list[str]:
    """Describe the data and what is omitted; `joining` is the suggested --pack option for this model."""
    in_all = about = percent = ""
    share, made = 1.0, report.questions
    num_documents = report.num_documents - made.get("num_conversations", 0)
    num_tokens = report.num_tokens - made.get("num_tokens", 0)
    if report.num_in_all is not None and report.num_in_all > num_documents:
        share = num_documents / report.num_in_all
        in_all, percent = f" of {report.num_in_all:,}", f" ({100 * share:.1f} %)"
        if report.num_tokens_in_all is not None:
            about = f" of about {report.num_tokens_in_all:,}"
    first = (
        f"data: {num_documents:,}{in_all} documents{percent}, {num_tokens:,}{about} tokens → "
        f"{report.num_sequences:,} sequences of {options.sequence_length:,}; {report.num_dropped:,} tokens dropped"
    )
    lines = []
    in_sequences = count_tokens(report, options.sequence_length)
    if made:
        lines.append(
            f"and {made['num_conversations']:,} conversations with {made['num_questions']:,} questions about them, "
            f"{made['num_tokens']:,} tokens ({100 * made['num_tokens'] / in_sequences:.0f} % of the sequences)"
        )
        if made["num_unknown"]:
            lines.append(f"no questions about {made['num_unknown']:,} documents in other languages")
    shorter = [f"{count:,} of {int(length):,}" for length, count in report.num_shorter.items()]
    if shorter:
        lines.append(f"and {', '.join(shorter)} tokens")
    if report.num_learned < in_sequences:
        lines.append(f"loss computed on {100 * report.num_learned / in_sequences:.1f} % of tokens")
    if report.num_padding > _WASTE * in_sequences:
        remedy = f"; use --pack {joining} to pack documents" if options.pack == "off" else ""
        lines.append(f"{100 * report.num_padding / in_sequences:.0f} % padding{remedy}")
    if report.num_bad:
        lines.append(f"{report.num_bad:,} bad records skipped, the first: {report.first_bad}")
    if report.unused_fields:
        lines.append(f"ignored fields: {', '.join(sorted(report.unused_fields))}")
    if report.num_turns_left_out:
        lines.append(
            f"{report.num_turns_left_out:,} answers not learned: the chat template changes them when messages follow"
        )
    lines += [
        f"{count:,} conversations with {kind} that the chat template does not render"
        for kind, count in report.left_out.items()
    ]
    if report.num_short:
        lines.append(f"{report.num_short:,} documents too short for a sequence; use --pack run-on to join them")
    if report.num_long:
        lines.append(f"{report.num_long:,} documents with marked answers too long for a sequence")
    lines += [
        f"no sequences of {int(length):,} tokens: those steps use {options.sequence_length:,}"
        for length, count in report.num_shorter.items()
        if not count
    ]
    if share < _FEW:
        lines.append("less than a tenth of the documents is used; raise --steps or --batch-size to use more")
    times = options.count_sequences()[options.sequence_length] / report.num_sequences
    if times > 1:
        lines.append(f"each sequence is used {times:.1f} times")
    return [first, *(f"      {line}" for line in lines)]


def count_tokens(report: DataReport, sequence_length: int) -> int:
    """Count the tokens in all sequences; `sequence_length` is the full length."""
    shorter = sum(int(length) * count for length, count in report.num_shorter.items())
    return shorter + report.num_sequences * sequence_length


def prepare(
    base: Base,
    folder: Path,
    read_stages: Sequence[DocumentReader],
    options: TrainingOptions,
    *,
    merge: bool,
    reporter: Reporter,
    read_held_out: DocumentReader | None = None,
) -> Prepared:
    """Load the model and read the data, unless an earlier run already wrote the sequences.

    Args:
        base: The checkpoint.
        folder: Folder of the sequences and the saves.
        read_stages: Function that returns the documents, for each stage.
        options: The options, resolved.
        merge: Whether trained weights must have a place in the checkpoint.
        reporter: Callbacks for stages and information.
        read_held_out: Function that returns the documents for evaluation during training.
    """
    report_line = reporter.notify or (lambda line: None)
    if not base.model.is_extended:
        length = base.model.encoding.context_length
        report_line(f"{base.checkpoint.public_name} is not extended; its context length remains {length:,} tokens")
    is_first = rank() == 0
    restart, full = options.pack == "restart", options.full
    precision = choose_precision(options.device, options.dtype, full=full, in_4bit=options.quantize == "4bit")
    is_evaluated = read_held_out is not None
    arguments = make_training_arguments(options, precision, folder, num_processes(), is_evaluated=is_evaluated)
    reporter.report_stage("loading the model")
    model, tokenizer = load_base(base, precision, by_document=restart)
    by_position = PositionLosses()
    source = load_source(base, model, precision, full=full, by_document=restart) if options.keep_short else None
    inputs = _get_reading(base, model, tokenizer, options.positions)
    can_restart = options.positions == "full" and _can_restart(
        base, model, inputs.first_index, keep_short=options.keep_short
    )
    if restart and not can_restart:
        raise CtxextError(
            f'--pack restart cannot separate documents in "{base.model.family.model_type}" with this version of '
            "transformers: each would attend to those before it.",
            hint="Join documents with --pack run-on.",
        )
    offloads = options.low_memory and arguments.device.type not in WITHOUT_OWN_MEMORY
    if options.low_memory:
        report_line(_reduce_memory(base, model, options, offloads=offloads))
    head = use_chunked_loss(
        model,
        options.piece,
        source,
        by_position,
        tokens_per_step=options.batch_size * options.sequence_length,
        is_masked=base.is_masked,
        offloads=offloads,
    )
    set_seed(options.seed)  # The initial weights of the adapter depend on it.
    if full:
        trained, counts = model, (model.num_parameters(only_trainable=True), model.num_parameters())
    else:
        task = None if base.is_masked else "CAUSAL_LM"
        trained = add_adapter(model, options, whole=base.learned_tensors, task=task)
        counts = trained.get_nb_trainable_parameters()  # peft counts 4-bit weights unpacked.
    if merge and is_first:
        check_mergeable(base, trained)
    if options.sequence_parallel > 1:
        if not can_split(model):
            raise CtxextError(
                f'--sequence-parallel cannot split sequences of "{base.model.family.model_type}" with this version of '
                "transformers: its layers do not read positions of other processes.",
                hint="Remove it.",
            )
        if num_processes() > 1:
            split_attention(model, options.sequence_parallel)
    if options.minutes is not None:
        reporter.report_stage("measuring the time of a step")
        setup = {"inputs": inputs, "precision": precision, "world": num_processes(), "folder": folder}
        options = dataclasses.replace(options, steps=_fit_once(folder / PLANNED, options, trained, setup))
    reporter.report_stage("reading the data")
    read_once = functools.partial(_read_once, pack=options.pack, tokenizer=tokenizer, is_masked=base.is_masked)
    with arguments.main_process_first(local=False, desc="reading the data"):
        reports = [
            read_once(place, read_documents, stage.count_sequences(), stage.sequence_length)
            for place, read_documents, stage in zip(
                stage_folders(folder, options), read_stages, options.each_stage, strict=True
            )
        ]
        length = options.sequence_length
        if read_held_out is not None:
            read_once(folder / HELD_OUT, read_held_out, {length: _NUM_HELD_OUT}, length)
    read = tuple(report for report in reports if report is not None)
    if len(read) < len(reports):
        raise CtxextError(
            f'The sequences that the first process wrote to "{folder}" are not visible to this process.',
            hint="Choose an OUT on a disk shared by all machines.",
        )
    options = options.for_data(read[0].num_sequences)
    arguments.max_steps, arguments.warmup_steps = options.num_steps, options.each_stage[0].warmup_steps
    joining = "restart" if can_restart else "run-on"
    for number, (report, stage) in enumerate(zip(read, options.each_stage, strict=True), 1):
        if options.stages:
            report_line(
                f"stage {number} of {len(read)}: {format_count(stage.num_steps, 'step')}, "
                f"learning rate {stage.learning_rate:g}"
            )
        for line in format_data_lines(report, stage, joining):
            report_line(line)
    if restart and not attends_by_document(model):
        report_line(
            "      with --pack restart this model builds an attention mask of length × length, "
            f"{length**2 / 2**30:.2g} GiB or more, not counted by --dry-run"
        )
    held_out, needle = read_report(folder / HELD_OUT, length), None
    if held_out is not None:
        report_line(f"evaluation on {held_out.num_sequences:,} sequences every {options.save_every:,} steps")
        # Skip it if no prompt fits, or if processes may hold parts of the model.
        if not base.is_masked and num_processes() == 1:
            assert options.length is not None, "the options are resolved"
            with contextlib.suppress(CtxextError):
                needle = NeedleProbe(head, tokenizer, options.length, options.seed)
    report_line(str(precision))
    return Prepared(trained, arguments, options, read, held_out, (by_position, needle), inputs, *counts, precision)


def _reduce_memory(base: Base, model: Any, options: TrainingOptions, *, offloads: bool) -> str:
    """Tile the feed-forward blocks of a model, and describe what is done to need less memory."""
    with gather_weights(model):
        num_blocks = tile_blocks(model, options.sequence_length)
    if not (num_blocks or offloads):
        raise CtxextError(
            f'--low-memory has no effect on "{base.model.family.model_type}" here: its feed-forward blocks are not '
            "separate modules, and the activations are in the memory of the machine already.",
            hint="Remove it.",
        )
    parts = [f"{format_count(num_blocks, 'feed-forward block')} in tiles"] if num_blocks else []
    parts += ["activations of checkpointing in the memory of the machine"] if offloads else []
    return f"less memory: {', '.join(parts)}"


def _fit_once(path: Path, options: TrainingOptions, trained: Any, setup: Mapping[str, Any]) -> int:
    """Return the number of steps that fit into --minutes by the first process; a resumed run has as many as before."""
    if not path.is_file():
        assert options.minutes is not None
        num_steps = fit_steps(options, trained, options.minutes, **setup)
        set_seed(options.seed)
        if rank() == 0:
            with explain_disk_errors(path):
                write_whole(path, as_json({"steps": num_steps}).encode())
    wait_for(path)
    return int(read_json_object(path)["steps"])


def _can_restart(base: Base, model: Any, first_index: int | None, *, keep_short: bool) -> bool:
    """Return whether --pack restart can be combined with this model and the other options."""
    try:
        check_fits(base, restart=True, keep_short=keep_short)
    except CtxextError:
        return False
    with gather_weights(model):
        return can_separate_documents(model, first_index)


def _get_reading(base: Base, model: Any, tokenizer: Any, positions: str) -> ModelInputs:
    """Return the inputs that the model needs; some families compute positions internally."""
    takes_positions = "position_ids" in inspect.signature(base_of(model).forward).parameters
    first_index = base.model.encoding.first_index if takes_positions else None
    if first_index is None and positions != "full":
        raise CtxextError(
            f'"{base.model.family.model_type}" computes positions internally, so none can be skipped.',
            hint=f"Remove --positions {positions}.",
        )
    mask = make_masker(tokenizer, MASKED_SHARE) if base.is_masked else None
    return ModelInputs(first_index, mask)


def _read_once(
    folder: Path,
    read_documents: DocumentReader,
    needed: Mapping[int, int],
    length: int,
    *,
    pack: str,
    tokenizer: Any,
    is_masked: bool,
) -> DataReport | None:
    """Write sequences in the first process, unless an earlier run did; return None if they are not visible here.

    Args:
        folder: The folder of the sequences, which is created.
        read_documents: Function that returns the documents.
        needed: The number of sequences by length in tokens.
        length: The full length.
        pack: How to join documents.
        tokenizer: The tokenizer.
        is_masked: Whether the model predicts masked tokens.
    """
    report = read_report(folder, length)
    if report is not None or rank() != 0:
        return report
    with explain_disk_errors(folder):
        folder.mkdir(exist_ok=True)
        documents = read_documents(tokenizer, needed)
        if is_masked and isinstance(documents, Documents) and documents.has_questions:
            raise CtxextError("--questions needs a model that generates text.", hint="Remove --questions.")
        return write_sequences(documents, folder, num_needed=needed, pack=pack, end=tokenizer.eos_token_id)


def check_mergeable(base: Base, model: Any) -> None:
    """Check, before training, that every trained weight has a place in the files and is stored as plain numbers."""
    shapes = read_shapes(base.checkpoint)
    types = {name: entry["dtype"] for name, entry in base.checkpoint.headers.items()}
    shapes = add_shares(shapes, find_shares(base.checkpoint, shapes))
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad or "lm_head" in name:
            continue
        owner = name.removeprefix("base_model.model.")
        owner = re.sub(r"\.lora_.*|\.(modules_to_save|base_layer)(\.default)?", "", owner)
        owner = owner if owner.endswith((".weight", ".bias")) else f"{owner}.weight"
        place = find_stored_name(owner, shapes)
        if place is None:
            raise CtxextError(
                f'"{owner}" cannot be merged: "{base.checkpoint.name}" stores it under another name.',
                hint="Keep the adapter separate with --no-merge.",
            )
        if place in types:  # A share of a joined tensor has no entry.
            check_type(place, types[place])
