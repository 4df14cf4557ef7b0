"""The same run as a configuration of another trainer, and by name what that trainer cannot hold or does otherwise.

The functions that write a configuration read the options through `_Noted`, so that an option that none of them read is
known, and named unless it does nothing.
"""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ctxext.data.records import is_plain_text, kind_of
from ctxext.errors import CtxextError
from ctxext.finetune.base import Base
from ctxext.finetune.formats import ROLES, TEXT, formats_with
from ctxext.finetune.loop import MUON, warmup_steps
from ctxext.finetune.mixture import Source, parse_source
from ctxext.finetune.options import TrainingOptions
from ctxext.finetune.training_data import TrainingData

_NEUTRAL = {"short_share": 0.0}
"""Values with which an option does nothing, where that is not its default."""
_IMPLIED = ("length", "original_length", "short_length", "window", "group", "piece", "device")
"""What follows from others, or belongs to this machine."""
_OF_LORA = ("rank", "alpha", "dropout")
"""What means nothing with --full."""


class _Noted:
    """Options that note which of them were read."""

    def __init__(self, options: TrainingOptions) -> None:
        self.options, self.read = options, set[str]()

    def leave(self, name: str) -> None:
        """Count an option as not read: at its value it cannot be said."""
        self.read.discard(name)

    def __getattr__(self, name: str) -> Any:
        self.read.add(name)
        return getattr(self.options, name)


def _loop(options: Any) -> dict[str, Any]:
    """What all name alike, as they hand it on to transformers' Trainer."""
    return {
        **({"num_train_epochs": options.epochs} if options.epochs else {"max_steps": options.steps}),
        "gradient_accumulation_steps": options.batch_size // options.micro_batch,
        "learning_rate": options.learning_rate,
        "weight_decay": options.weight_decay,
        "adam_beta1": options.beta1,
        "adam_beta2": options.beta2,
        "gradient_checkpointing": options.checkpointing,
        "seed": options.seed,
        "save_steps": options.save_every,
        "logging_steps": 1,
        **({"neftune_noise_alpha": options.neftune} if options.neftune else {}),
    }


def _schedule(options: Any) -> str:
    return "constant_with_warmup" if options.schedule == "constant" else str(options.schedule)


def _axolotl(options: Any, data: list[tuple[Source, str]], reading: TrainingData) -> dict[str, Any]:
    """For `axolotl train`."""
    loop = _loop(options)
    if "num_train_epochs" in loop:
        loop["num_epochs"] = loop.pop("num_train_epochs")
    content: dict[str, Any] = {
        "sequence_len": options.sequence_length,
        "sample_packing": options.pack == "restart",
        "train_on_inputs": options.learn == "all",
        "datasets": [_for_axolotl(source, form, reading) for source, form in data],
        "micro_batch_size": options.micro_batch,
        "lr_scheduler": _schedule(options),
        **({"cosine_min_lr_ratio": options.rate_floor} if options.rate_floor else {}),
        "warmup_ratio": options.warmup,
        "optimizer": options.optimizer,
        "bf16": "auto",
        **({"early_stopping_patience": options.patience} if options.patience else {}),
        **loop,
    }
    if options.positions == "pose":
        content |= {"use_pose": True, "pose_max_context_len": options.length, "pose_num_chunks": 2}
    elif options.positions == "random":
        options.leave("positions")
    if options.pack == "run-on":
        options.leave("pack")
    if options.context_parallel > 1:
        content["context_parallel_size"] = options.context_parallel
    if not options.full:
        content |= {
            "adapter": "lora" if options.quantize == "none" else "qlora",
            "load_in_4bit": options.quantize == "4bit",
            "lora_r": options.rank,
            # Whole numbers alone are known there.
            "lora_alpha": round(options.alpha),
            "lora_dropout": options.dropout,
            **({"lora_target_modules": list(options.targets)} if options.targets else {"lora_target_linear": True}),
            "peft_use_rslora": options.rslora,
            "peft_use_dora": options.dora,
        }
    return content


_AXOLOTL_TYPES: dict[str, dict[str, Any]] = {
    "chat": {"type": "chat_template", "field_messages": "messages"},
    "sharegpt": {
        "type": "chat_template",
        "field_messages": "conversations",
        "message_property_mappings": {"role": "from", "content": "value"},
    },
    "alpaca": {"type": "alpaca"},
    "prompt-completion": {
        "type": {
            "field_instruction": "prompt",
            "field_output": "completion",
            "format": "{instruction}",
            "no_input_format": "{instruction}",
        }
    },
}


def _for_axolotl(source: Source, form: str, reading: TrainingData) -> dict[str, Any]:
    return {
        "path": source.data,
        **({"ds_type": _loader_of(source.data)} if Path(source.data).is_file() else {}),
        "split": reading.split,
        **({"type": "completion", "field": reading.text_field} if form == TEXT else _AXOLOTL_TYPES[form]),
    }


def _trl(options: Any, data: list[tuple[Source, str]], reading: TrainingData) -> dict[str, Any]:
    """For `trl sft --config`."""
    forms = {form for _, form in data}
    if "alpaca" in forms:
        raise CtxextError(
            "TRL reads no records of alpaca.",
            hint="Name their fields prompt and completion, or take --to axolotl.",
        )
    learns_answers = options.learn == "answers"
    return {
        "datasets": [
            {"path": _loader_of(source.data), "data_files": source.data, "split": reading.split}
            if Path(source.data).is_file()
            else {"path": source.data, "split": reading.split}
            for source, _ in data
        ],
        "dataset_text_field": reading.text_field,
        "max_length": options.sequence_length,
        "packing": options.pack != "off",
        "packing_strategy": "wrapped" if options.pack == "run-on" else "bfd_split",
        "assistant_only_loss": learns_answers and bool(forms & {"chat", "sharegpt"}),
        **({"completion_only_loss": learns_answers} if "prompt-completion" in forms else {}),
        "per_device_train_batch_size": options.micro_batch,
        "lr_scheduler_type": "cosine_with_min_lr" if options.rate_floor else _schedule(options),
        **({"lr_scheduler_kwargs": {"min_lr_rate": options.rate_floor}} if options.rate_floor else {}),
        # Below 1 a share of the steps, which transformers 4 does not know.
        "warmup_steps": options.warmup if options.epochs else warmup_steps(options),
        "loss_type": "chunked_nll",
        "report_to": options.report_to,
        **_loop(options),
        **({} if options.options.optimizer == MUON else {"optim": options.optimizer}),
        **(
            {}
            if options.full
            else {
                "use_peft": True,
                "load_in_4bit": options.quantize == "4bit",
                "use_bnb_nested_quant": options.quantize == "4bit",
                "lora_r": options.rank,
                "lora_alpha": round(options.alpha),
                "lora_dropout": options.dropout,
                "lora_target_modules": list(options.targets) or ["all-linear"],
                "use_rslora": options.rslora,
                "use_dora": options.dora,
            }
        ),
    }


def _loader_of(file: str) -> str:
    """What `datasets` calls the kind of a file."""
    kinds = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}
    return kinds.get(kind_of(Path(file)), "text")


_Writer = Callable[[Any, list[tuple[Source, str]], TrainingData], dict[str, Any]]
TRAINERS: Mapping[str, tuple[_Writer, str, tuple[str, ...]]] = {
    "axolotl": (
        _axolotl,
        "axolotl train",
        ("which documents are seen is its own shuffle, and the batch is for one device",),
    ),
    "trl": (
        _trl,
        "trl sft --config",
        (
            "without packing a text longer than a sequence loses its end; here it makes several sequences",
            "which documents are seen is its own shuffle, and the batch is for one device",
            "answers of conversations are learned where the chat template marks them by {% generation %} alone",
        ),
    ),
}
"""For each trainer what writes its configuration, the command that runs it, and what it does otherwise in any case."""


def export_run(
    trainer: str, base: Base, model: str, out: str, data: TrainingData, options: TrainingOptions
) -> tuple[dict[str, Any], list[str]]:
    """The configuration, and what it does not hold or the trainer does otherwise, a sentence each.

    Args:
        trainer: One of `TRAINERS`.
        base: The checkpoint that is trained.
        model: Its folder or Hub id.
        out: Where the trainer will write.
        data: The data.
        options: The options, settled.

    Raises:
        CtxextError: the trainer is not known, or cannot read the data.
    """
    if trainer not in TRAINERS:
        raise CtxextError(f'--to "{trainer}" is not known.', hint=f"Choose {' or '.join(TRAINERS)}.")
    if not data.words or data.is_demo:
        raise CtxextError("Only --data of files, folders and data sets can be written for another trainer.")
    if base.is_masked or base.is_own_code:
        raise CtxextError(
            f'"{base.checkpoint.name}" is no stock causal language model, which alone is written for other trainers.'
        )
    write, _, otherwise = TRAINERS[trainer]
    sources = [parse_source(word) for word in data.words]
    for source in sources:
        if kind_of(Path(source.data)) == ".tsv":
            raise CtxextError(
                f'"{source.data}" would be read with commas there, not tabs.',
                hint="Save it as .csv, .jsonl or .parquet.",
            )
    noted = _Noted(options)
    name = "base_model" if trainer == "axolotl" else "model_name_or_path"
    content = {name: model, "output_dir": out}
    forms = []
    for source in sources:
        first = _first_record(source, data)
        forms.append((source, _format_of(source, first, data)))
        _check_readable(trainer, source, forms[-1][1], first)
    content |= write(noted, forms, data)
    plain = TrainingOptions()
    unheld = [
        field.name
        for field in dataclasses.fields(options)
        if field.name not in (*noted.read, *_IMPLIED, *(_OF_LORA if options.full else ()))
        and getattr(options, field.name) != _NEUTRAL.get(field.name, getattr(plain, field.name))
    ]
    lost = [_worded(name, getattr(options, name)) for name in unheld]
    lost += [_worded("data", f"{source.data}:{source.weight:g}") for source in sources if source.weight is not None]
    lost += [_worded(name, getattr(data, name)) for name in ("skip_bad_rows", "long_share") if getattr(data, name)]
    if options.alpha != round(options.alpha or 0) and not options.full:
        lost.append(_worded("alpha", options.alpha))
    texts = [f'"{source.data}" is read line by line there' for source in sources if is_plain_text(source.data)]
    if {form for _, form in forms} & {"chat", "sharegpt"}:
        texts.append("the weight of a message is not read there: answers of weight 0 are learned too")
    if not options.full:
        texts.append("the result is an adapter, which ctxext merge adds to the base")
    return content, [*(f"{words} cannot be said there" for words in lost), *texts, *otherwise]


def _worded(name: str, value: object) -> str:
    return f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}")


def _first_record(source: Source, data: TrainingData) -> Mapping[str, Any]:
    """The first record of files; nothing of a data set of the Hub, which would have to be read."""
    _, first = next(source.read((data.split or "train",), 0), ("", {})) if source.is_local else ("", {})
    return first


def _check_readable(trainer: str, source: Source, form: str, first: Mapping[str, Any]) -> None:
    """Refuse records of a known format that the trainer reads as something else.

    Raises:
        CtxextError: such are the records.
    """
    if trainer == "axolotl" and isinstance(first.get("prompt"), list):
        raise CtxextError(
            f'axolotl reads "prompt" and "completion" of "{source.data}" as texts, and they are lists of messages.',
            hint='Join the two as "messages", or take --to trl.',
        )
    turns = first.get("conversations") or () if form == "sharegpt" else ()
    others = [str(turn.get("from")) for turn in turns if isinstance(turn, Mapping) and turn.get("from") in ROLES]
    if trainer == "trl" and others:
        raise CtxextError(
            f'TRL leaves the role "{others[0]}" in "{source.data}" as it is, which chat templates do not know.',
            hint="Call the roles user and assistant, or take --to axolotl.",
        )


def _format_of(source: Source, first: Mapping[str, Any], data: TrainingData) -> str:
    """What the records of a source are: as given, or what the first of them is.

    Raises:
        CtxextError: it cannot be known without reading a data set of the Hub, or fits none or several.
    """
    if data.record_format != "auto":
        return data.record_format
    forms = formats_with(data.text_field)
    fitting = [name for name, form in forms.items() if form.fits(first)]
    if len(fitting) != 1:
        raise CtxextError(f'What the records of "{source.data}" are is not known.', hint="Say it with --format.")
    return fitting[0]
