"""Make, change and load the tiny checkpoints that these tests run on."""

import json
import shutil
import sys
import uuid
from importlib import resources
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from ctxext.recipes.mspoe_layout import CODE_FILE, STUB_FILE, edit_config, family_classes, render_stub

CODE = Path(str(resources.files("ctxext.portable"))) / CODE_FILE
MODERN = not hasattr(LlamaConfig(), "rope_theta")


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


def convert(source, target, **options):
    """What `ctxext convert --method mspoe` writes, at a folder named like `target`."""
    # Remote code is cached by folder name, so each gets a name of its own.
    target = Path(target).with_name(f"{Path(target).name}_{uuid.uuid4().hex[:8]}")
    shutil.copytree(source, target)
    config = json.loads((target / "config.json").read_text())
    classes = family_classes(config)
    (target / "config.json").write_text(json.dumps(edit_config(config, classes=classes, **options), indent=1))
    (target / STUB_FILE).write_text(render_stub(classes))
    shutil.copyfile(CODE, target / CODE_FILE)
    return target


def load(folder, **options):
    """Load a checkpoint in float32, its own code included."""
    options = {"dtype": torch.float32, "trust_remote_code": True} | options
    return AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def code_of(model):
    """The shipped module that a loaded model runs."""
    return sys.modules[type(model).__module__.rsplit(".", 1)[0] + "." + CODE_FILE.removesuffix(".py")]


def tokens(length, rows=1, seed=0, vocabulary=64):
    """Random token ids without the padding token, (rows, length)."""
    return torch.randint(3, vocabulary, (rows, length), generator=torch.Generator().manual_seed(seed))


def ranks_of(cache):
    """The ratio numbers that a cache holds: layer to (batch, key heads)."""
    return {layer: ranks.clone() for layer, ranks in cache.mspoe_ranks.items()}


def with_ranks(source, target, cache, row=0, **options):
    """Convert with the head order that a prompt chose, as a static order."""
    orders = [ranks[row].tolist() for _, ranks in sorted(ranks_of(cache).items())]
    return convert(source, target, head_order="calibrated", orders=orders, **options)
