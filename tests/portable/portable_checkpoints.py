"""Make, change and load the tiny checkpoints that these tests run on."""

import json
import shutil
import sys
import uuid
from importlib import resources
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import tiny_models
from ctxext.api import Recipe
from ctxext.checkpoint.families import FAMILIES, family_of, rotated_layers
from ctxext.methods import MsPoE
from ctxext.recipes.model_config import model_config
from loaded_models import load as load

CODE_FILE = "mspoe.py"
CODE = Path(str(resources.files("ctxext.portable"))) / CODE_FILE


def half_of(number):
    """CI runs one half of the cases, `make slow` both."""
    return pytest.mark.thorough if number % 2 else pytest.mark.slow


def llama(folder, seed=0, **changes):
    """Save a random Llama whose attention is far from uniform: 3 layers, 4 heads of 16, 2 key heads, 256 positions."""
    torch.manual_seed(seed)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 64,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": None,
    }
    LlamaForCausalLM(LlamaConfig(**(sizes | changes))).save_pretrained(folder)
    return Path(folder)


def plain_source(model_type, folder):
    """A tiny checkpoint whose rotated layers all look back over the whole context, where the family can say so."""
    folder = tiny_models.save(model_type, folder)
    config = json.loads((folder / "config.json").read_text())
    text = config.get("text_config", config)
    if not rotated_layers(config, family_of(config)):
        if "layer_types" in text:
            text["layer_types"] = [
                "full_attention" if "sliding" in name or "chunked" in name else name for name in text["layer_types"]
            ]
        if FAMILIES[text["model_type"]].rotated == "unless_window" or "layer_types" not in text:
            text["sliding_window"] = None
    (folder / "config.json").write_text(json.dumps(config))
    return folder, config


def convert(source, target, **options):
    """What `ctxext convert --method mspoe` writes, at a folder named like `target`."""
    # Remote code is cached by folder name, so each gets a name of its own.
    target = Path(target).with_name(f"{Path(target).name}_{uuid.uuid4().hex[:8]}")
    shutil.copytree(source, target)
    return write(target, MsPoE(**{"schedule": "linear", "head_order": "prompt", **options}))


def write(target, *steps):
    """Turn a copied checkpoint into what these steps make of it; the weights stay."""
    model = model_config(json.loads((target / "config.json").read_text()))
    recipe = Recipe(steps).resolve(model)
    (target / "config.json").write_text(json.dumps(recipe.edit(model).config, indent=1))
    for name, text in recipe.code_files(model.config).items():
        (target / name).write_text(text)
    return target


def code_of(model):
    """The shipped module that a loaded model runs."""
    return sys.modules[type(model).__module__.rsplit(".", 1)[0] + "." + CODE_FILE.removesuffix(".py")]


def tokens(length, rows=1, seed=0, vocabulary=64):
    """Random token ids without the padding token, (rows, length)."""
    return torch.randint(3, vocabulary, (rows, length), generator=torch.Generator().manual_seed(seed))


def ranks_of(cache):
    """The ratio numbers that a cache holds: layer to (batch, key heads)."""
    return {layer: ranks.clone() for (_, layer), ranks in cache.ctxext_state.rows.items()}


def with_ranks(source, target, cache, row=0, **options):
    """Convert with the head order that a prompt chose, as a static order."""
    orders = [ranks[row].tolist() for _, ranks in sorted(ranks_of(cache).items())]
    return convert(source, target, head_order="calibrated", ranks=tuple(map(tuple, orders)), **options)
