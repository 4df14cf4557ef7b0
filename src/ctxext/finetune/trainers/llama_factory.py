"""The configuration of LLaMA-Factory: the fields of `llamafactory.hparams`."""

import json
from pathlib import Path
from typing import Any

from ctxext.finetune.trainers.run import Run, RunData, training_arguments
from ctxext.finetune.trainers.trainer import Trainer, write_yaml

_ROLES = {
    "role_tag": "role",
    "content_tag": "content",
    "user_tag": "user",
    "assistant_tag": "assistant",
    "system_tag": "system",
    "observation_tag": "tool",
    "function_tag": "function_call",
}


def _data(source: RunData, run: Run) -> dict[str, Any]:
    alpaca = {"prompt": "instruction", "response": "output"}
    # A column that is named but missing is an error there.
    more = {"query": "input"} if "input" in source.fields or not source.is_local else {}
    forms: dict[str, dict[str, Any]] = {
        "text": {"columns": {"prompt": run.data.text_field}},
        "chat": {"formatting": "sharegpt", "columns": {"messages": "messages"}, "tags": _ROLES},
        "sharegpt": {"formatting": "sharegpt"},
        "alpaca": {"columns": {**alpaca, **more}},
    }
    place = {"file_name": source.path} if source.is_local else {"hf_hub_url": source.path}
    split = {} if source.is_local else {"split": source.split}
    return {**place, **split, **forms[source.kind]}


def _write(run: Run) -> str:
    options = run.options
    names = [f"{Path(source.path).name.partition('.')[0]}-{number}" for number, source in enumerate(run.sources, 1)]
    info = {name: _data(source, run) for name, source in zip(names, run.sources, strict=True)}
    arguments = training_arguments(run)
    del arguments["gradient_checkpointing"]  # It has another switch, above.
    adapter = {
        "lora_rank": options.rank,
        "lora_alpha": run.alpha,
        "lora_dropout": options.dropout,
        "lora_target": ",".join(options.targets) or "all",
        "additional_target": ",".join(run.whole) or None,
        **({"quantization_bit": 4, "quantization_method": "bnb"} if options.quantize == "4bit" else {}),
    }
    content = {
        "model_name_or_path": run.model,
        "model_revision": run.revision,
        "stage": "pt" if run.kind == "text" else "sft",
        "do_train": True,
        "dataset_dir": ".",
        "dataset": ",".join(names),
        "cutoff_len": run.length + (options.pack != "off"),  # Packing removes one token.
        "packing": options.pack != "off",
        "neat_packing": True if options.pack == "restart" else None,
        "flash_attn": "fa2" if options.pack == "restart" else None,
        "train_on_prompt": True if run.kind != "text" and options.learn == "all" else None,
        "finetuning_type": "full" if options.full else "lora",
        **({} if options.full else adapter),
        "disable_gradient_checkpointing": not run.has_checkpointing,
        **arguments,
    }
    return f"# dataset_info.json, in the same folder: {json.dumps(info, ensure_ascii=False)}\n{write_yaml(content)}"


TRAINER = Trainer(
    "llama-factory",
    "LLaMA-Factory",
    "0.9.5",
    "llamafactory-cli train FILE",
    _write,
    extras=frozenset({"pack run-on", "split", "report-to"}),
    whole_alpha=True,
)
