"""Python scripts for trainers that are called from Python."""

from collections.abc import Mapping
from typing import Any

from ctxext.finetune.trainers.run import Run, RunData, training_arguments
from ctxext.finetune.trainers.trainer import Trainer

_SHAREGPT = """ROLES = {"human": "user", "gpt": "assistant"}


def to_messages(row):
    turns = [{"role": ROLES.get(turn["from"], turn["from"]), "content": turn["value"]} for turn in row["conversations"]]
    return {"messages": turns}
"""
_ALPACA = """def to_messages(row):
    question = "\\n\\n".join(filter(None, (row["instruction"], row.get("input"))))
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": row["output"]}]}
"""
_CONVERTERS = {"sharegpt": _SHAREGPT, "alpaca": _ALPACA}
"""Functions that convert a record to messages, by format."""


class Expression(str):
    """Python code, unlike a string."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def format_call(name: str, keywords: Mapping[str, Any]) -> str:
    """Return a call as Python code, one argument a line."""
    return f"{name}(\n" + "".join(f"    {key}={_format(value)},\n" for key, value in keywords.items()) + ")"


def _format(value: Any) -> str:
    if isinstance(value, str) and not isinstance(value, Expression):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_format(key)}: {_format(entry)}" for key, entry in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_format, value)) + "]"
    return repr(value)


def _load(source: RunData) -> str:
    split = f"split={_format(source.split)}"
    if source.builder:
        return f"load_dataset({_format(source.builder)}, data_files={_format(source.path)}, {split})"
    return f"load_dataset({_format(source.path)}, {split})"


def _data(run: Run) -> str:
    """Return the code that loads the data, with the columns that the trainer reads."""
    loads = [_load(source) for source in run.sources]
    code = loads[0] if len(loads) == 1 else f"concatenate_datasets([{', '.join(loads)}])"
    lines = [f"data = {code}"]
    if run.kind in _CONVERTERS:
        lines.append("data = data.map(to_messages, remove_columns=data.column_names)")
    return "\n".join(lines)


def _imports(run: Run, *names: str) -> str:
    loaders = "concatenate_datasets, load_dataset" if len(run.sources) > 1 else "load_dataset"
    return "\n".join([f"from datasets import {loaders}", *names])


def _sft_arguments(run: Run) -> dict[str, Any]:
    """Return the arguments of TRL's SFTConfig."""
    options = run.options
    packing: dict[str, dict[str, Any]] = {
        "off": {"packing": False},
        "run-on": {"packing": True, "packing_strategy": "wrapped"},
        # bfd cuts what is longer than a sequence; bfd_split keeps it, which would tear a conversation apart.
        "restart": {"packing": True, "packing_strategy": "bfd_split" if run.kind == "text" else "bfd"},
    }
    learned: dict[str, dict[str, Any]] = {
        "text": {"dataset_text_field": run.data.text_field},
        "prompt-completion": {"completion_only_loss": run.learns_answers},
    }
    return {
        **training_arguments(run),
        "max_length": run.length,
        **packing[options.pack],
        **learned.get(run.kind, {"assistant_only_loss": run.learns_answers}),
        "shuffle_dataset": True,
    }


def _join(*parts: str) -> str:
    return "\n\n".join(part.strip("\n") for part in parts if part) + "\n"


def _converter(run: Run) -> str:
    return f"\n{_CONVERTERS[run.kind]}\n" if run.kind in _CONVERTERS else ""


_TRL_TYPES = {"auto": "auto", "bf16": "auto", "fp16": "auto", "fp32": "float32"}


def _write_trl(run: Run) -> str:
    options, in_4bit = run.options, run.options.quantize == "4bit"
    loading: dict[str, Any] = {"dtype": _TRL_TYPES[options.dtype]}
    if run.revision:
        loading["revision"] = run.revision
    if options.pack == "restart":
        loading["attn_implementation"] = "flash_attention_2"
    if in_4bit:
        loading["quantization_config"] = Expression("quantization")
    quantization = format_call(
        "quantization = BitsAndBytesConfig",
        {
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": True,
            "bnb_4bit_compute_dtype": "bfloat16" if run.in_bf16 else "float16",
        },
    )
    adapter = format_call(
        "adapter = LoraConfig",
        {
            "task_type": "CAUSAL_LM",
            "r": options.rank,
            "lora_alpha": run.alpha,
            "lora_dropout": options.dropout,
            "target_modules": list(options.targets) or "all-linear",
            **({"modules_to_save": list(run.whole)} if run.whole else {}),
        },
    )
    trainer = format_call(
        "trainer = SFTTrainer",
        {
            "model": run.model,
            "args": Expression("arguments"),
            "train_dataset": Expression("data"),
            **({} if options.full else {"peft_config": Expression("adapter")}),
        },
    )
    return _join(
        _imports(
            run,
            *(() if options.full else ("from peft import LoraConfig",)),
            *(("from transformers import BitsAndBytesConfig",) if in_4bit else ()),
            "from trl import SFTConfig, SFTTrainer",
        ),
        _converter(run),
        quantization if in_4bit else "",
        format_call("arguments = SFTConfig", {"model_init_kwargs": loading, **_sft_arguments(run)}),
        "" if options.full else adapter,
        f"{_data(run)}\n{trainer}\ntrainer.train()\ntrainer.save_model()",
    )


_UNSLOTH_TYPES = {"auto": "None", "bf16": "torch.bfloat16", "fp16": "torch.float16", "fp32": "torch.float32"}


def _write_unsloth(run: Run) -> str:
    options = run.options
    needs_torch = options.dtype != "auto"
    checkpointing = "unsloth" if run.has_checkpointing else False
    load = format_call(
        "model, tokenizer = FastLanguageModel.from_pretrained",
        {
            "model_name": run.model,
            **({"revision": run.revision} if run.revision else {}),
            # Above the declared length it would replace the schedule by a linear one.
            "max_seq_length": run.length,
            "dtype": Expression(_UNSLOTH_TYPES[options.dtype]),
            "load_in_4bit": options.quantize == "4bit",
            "full_finetuning": options.full,
            "use_gradient_checkpointing": checkpointing,
        },
    )
    adapter = format_call(
        "model = FastLanguageModel.get_peft_model",
        {
            "model": Expression("model"),
            "r": options.rank,
            "lora_alpha": run.alpha,
            "lora_dropout": options.dropout,
            "target_modules": list(options.targets) or "all-linear",
            **({"modules_to_save": list(run.whole)} if run.whole else {}),
            "use_gradient_checkpointing": checkpointing,
            "random_state": options.seed,
        },
    )
    trainer = format_call(
        "trainer = SFTTrainer",
        {
            "model": Expression("model"),
            "processing_class": Expression("tokenizer"),
            "args": Expression("arguments"),
            "train_dataset": Expression("data"),
        },
    )
    return _join(
        "\n".join(
            [
                "from unsloth import FastLanguageModel  # Before the others, which it changes.",
                *(["import torch"] if needs_torch else []),
                _imports(run, "from trl import SFTConfig, SFTTrainer"),
            ]
        ),
        _converter(run),
        load if options.full else f"{load}\n{adapter}",
        format_call("arguments = SFTConfig", _sft_arguments(run)),
        f"{_data(run)}\n{trainer}\ntrainer.train()\ntrainer.save_model()",
    )


TRL = Trainer(
    "trl",
    "TRL",
    "1.16.0",
    "python FILE",
    _write_trl,
    formats=frozenset({"text", "chat", "sharegpt", "alpaca", "prompt-completion"}),
    extras=frozenset({"pack run-on", "tools", "split", "dtype fp32", "report-to"}),
)
UNSLOTH = Trainer(
    "unsloth",
    "unsloth",
    "2026.10.9",
    "python FILE",
    _write_unsloth,
    extras=frozenset({"split", "dtype fp32", "report-to"}),
)
