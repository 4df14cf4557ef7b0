"""The configuration of ms-swift: the fields of `swift.arguments`."""

from ctxext.finetune.trainers.run import Run, training_arguments
from ctxext.finetune.trainers.trainer import Trainer, write_yaml

_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "phi3")
"""Families with several model types in ms-swift, which stops unless one is named."""

_TYPES = {"auto": "bfloat16", "bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def _write(run: Run) -> str:
    options, is_text = run.options, run.kind == "text"
    is_packed, family = options.pack == "restart", run.base.model.family.model_type
    adapter = {
        "lora_rank": options.rank,
        "lora_alpha": run.alpha,
        "lora_dropout": options.dropout,
        "target_modules": list(options.targets) or ["all-linear"],
        "modules_to_save": list(run.whole) or None,
        **({"quant_method": "bnb", "quant_bits": 4} if options.quantize == "4bit" else {}),
    }
    is_remote = run.revision is not None or not all(source.is_local for source in run.sources)
    return write_yaml(
        {
            "model": run.model,
            "model_revision": run.revision,
            # The chat template of a type differs from release to release, so for chats it is left to the user.
            "model_type": family if is_text and family in _FAMILIES else None,
            "template": "dummy" if is_text else None,
            "use_hf": True if is_remote else None,  # Its own default is another hub.
            "dataset": [source.path for source in run.sources],
            "columns": {run.data.text_field: "response"} if is_text else None,
            "max_length": run.length,
            "truncation_strategy": "split" if is_text else "delete",
            "packing": is_packed,
            "attn_impl": "flash_attention_2" if is_packed else "sdpa",
            "use_chat_template": False if is_text else None,
            "loss_scale": "default" if run.learns_answers else "all",
            "tuner_type": "full" if options.full else "lora",
            **({} if options.full else adapter),
            "torch_dtype": _TYPES[options.dtype],
            "data_seed": options.seed,
            "add_version": False,
            **training_arguments(run),
        }
    )


TRAINER = Trainer(
    "ms-swift",
    "ms-swift",
    "4.6.0",
    "swift {stage} FILE",
    _write,
    extras=frozenset({"tools", "dtype fp32", "report-to"}),
)
