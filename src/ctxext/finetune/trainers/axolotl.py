"""The configuration of axolotl: the keys of `axolotl.utils.schemas`."""

from typing import Any

from ctxext.finetune.trainers.run import Run, RunData, drop_none, scheduler
from ctxext.finetune.trainers.trainer import Trainer, write_yaml


def _data(source: RunData, run: Run) -> dict[str, Any]:
    forms: dict[str, dict[str, Any]] = {
        "text": {"type": "completion", "field": run.data.text_field},
        "chat": {"type": "chat_template", "field_messages": "messages"},
        "sharegpt": {
            "type": "chat_template",
            "field_messages": "conversations",
            "message_property_mappings": {"role": "from", "content": "value"},
        },
        "alpaca": {"type": "alpaca"},
    }
    return {**drop_none({"path": source.path, "ds_type": source.builder, "split": source.split}), **forms[source.kind]}


def _write(run: Run) -> str:
    options, schedule = run.options, scheduler(run)
    is_packed, is_posed = options.pack == "restart", options.positions == "pose"
    adapter = {
        "adapter": "lora" if options.quantize == "none" else "qlora",
        "load_in_4bit": True if options.quantize == "4bit" else None,
        "lora_r": options.rank,
        "lora_alpha": run.alpha,
        "lora_dropout": options.dropout,
        "lora_target_linear": None if options.targets else True,
        "lora_target_modules": list(options.targets) or None,
        "lora_modules_to_save": list(run.whole) or None,
    }
    positions = {
        "use_pose": True,
        "pose_max_context_len": run.length,
        "pose_num_chunks": 2,
    }
    return write_yaml(
        {
            "base_model": run.model,
            "revision_of_model": run.revision,
            "output_dir": run.out,
            "datasets": [_data(source, run) for source in run.sources],
            "sequence_len": options.sequence_length if is_posed else run.length,
            **(positions if is_posed else {}),
            "sample_packing": is_packed,
            "attn_implementation": "flash_attention_2" if is_packed else "sdpa",
            "train_on_inputs": options.learn == "all",
            **({} if options.full else adapter),
            **({"num_epochs": options.epochs} if options.epochs else {"max_steps": options.num_steps}),
            "micro_batch_size": options.micro_batch,
            "gradient_accumulation_steps": options.batch_size // options.micro_batch,
            "gradient_checkpointing": run.has_checkpointing,
            "activation_offloading": True if options.low_memory else None,
            "tiled_mlp": True if options.low_memory else None,
            "learning_rate": options.peak_rate,
            "lr_scheduler": schedule["name"],
            "lr_scheduler_kwargs": schedule["arguments"],
            **(
                {"warmup_ratio": options.each_stage[0].warmup}
                if options.epochs
                else {"warmup_steps": options.each_stage[0].warmup_steps}
            ),
            "optimizer": options.optimizer,
            "weight_decay": options.weight_decay,
            "adam_beta2": options.beta2,
            "bf16": run.in_bf16,
            "fp16": True if options.dtype == "fp16" else None,
            "seed": options.seed,
            "logging_steps": 1,
            "save_steps": options.save_every,
            "save_total_limit": 2,
            "use_tensorboard": True if options.report_to == "tensorboard" else None,
        }
    )


TRAINER = Trainer(
    "axolotl",
    "axolotl",
    "0.21.0",
    "axolotl train FILE",
    _write,
    extras=frozenset({"positions pose", "tools", "split", "dtype fp32", "low-memory"}),
    whole_alpha=True,
    mixes_formats=True,
)
