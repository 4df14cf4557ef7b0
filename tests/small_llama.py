"""A small random Llama checkpoint on disk, as a user's would look."""

import json
from pathlib import Path


def make_llama(folder: Path, *, seed: int = 0, **changes) -> Path:
    """Save a random Llama with a tokenizer's configuration, as a user's checkpoint would look."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 64,
        "max_position_embeddings": 128,
        "initializer_range": 0.3,
    }
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**{**settings, **changes}))
    model.save_pretrained(folder)
    window = model.config.max_position_embeddings
    (folder / "tokenizer_config.json").write_text(
        f'{{"tokenizer_class":   "PreTrainedTokenizerFast",\n "model_max_length": {window}, "note": "é"}}'
    )
    (folder / "special_tokens_map.json").write_text("{}")
    (folder / "README.md").write_text("---\nlicense: mit\nlanguage: [en]\ntags: [tiny]\n---\n# Tiny\n")
    return folder


def read_json(path: Path) -> dict:
    return json.loads(path.read_text())


def change_json(path: Path, **values) -> None:
    """Change keys of a JSON file, and leave what is recorded of it as it is."""
    path.write_text(json.dumps({**read_json(path), **values}))


def scheduled(folder: Path, **keys: object) -> Path:
    """Write keys into a checkpoint's config.json in the place of its schedule."""
    config = read_json(folder / "config.json")
    for key in ("rope_parameters", "rope_scaling", "original_max_position_embeddings"):
        config.pop(key, None)
    (folder / "config.json").write_text(json.dumps(config | keys))
    return folder


ADAPTER_CARD = '---\nbase_model: "me/base"\n---\nWritten by hand.\n'


def write_adapter(
    folder: Path, base: str = "me/base", tensor: str = "base_model.model.q_proj.lora_A.weight", **config
) -> Path:
    """Write a LoRA adapter of one tensor, with a card."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    save_file({tensor: torch.ones(2, 2)}, folder / "adapter_model.safetensors")
    content = {"base_model_name_or_path": base, "revision": "main", **config}
    (folder / "adapter_config.json").write_text(json.dumps(content))
    (folder / "README.md").write_text(ADAPTER_CARD)
    return folder
