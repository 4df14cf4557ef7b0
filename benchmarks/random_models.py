"""Random models, their conversions and measurements for the benchmarks of methods with code."""

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, DynamicCache, LlamaConfig, logging

from ctxext.api import Recipe
from ctxext.methods import MsPoE
from ctxext.portable.method import state_of
from ctxext.recipes.model_config import model_config
from ctxext.recipes.registry import method_named

logging.set_verbosity_error()
logging.disable_progress_bar()
TINY = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1, "vocab_size": 8}
MAPS = ["self-extend", "bifocal", "dca", "rerope", "sinks", "window", "adaptive"]


def convert(folder: Path, config, recipe: Recipe) -> Path:
    """Write the configuration and the code of a conversion to a folder."""
    folder.mkdir(exist_ok=True)
    settings = {**config.to_dict(), "architectures": config.architectures or ["LlamaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(recipe.edit(model_config(settings)).config))
    for file, text in recipe.code_files(settings).items():
        (folder / file).write_text(text)
    return folder


def map_recipe(kind: str, factor: float) -> Recipe:
    """Return the recipe of a relation map."""
    return Recipe([method_named(kind)(factor=factor)])


def mspoe_recipe(config, order: str = "calibrated", schedule: str = "linear") -> Recipe:
    """Return Ms-PoE on all layers, with its heads in a random order or in the order of the prompt."""
    heads = config.num_key_value_heads
    orders = [random.Random(layer).sample(range(heads), heads) for layer in range(config.num_hidden_layers)]
    ranks = tuple(map(tuple, orders)) if order == "calibrated" else None
    return Recipe([MsPoE(head_order=order, ranks=ranks, first_layer=0, schedule=schedule)])


def recipe_of(kind: str, config, factor: float) -> Recipe:
    """Return the recipe of any method with code."""
    if kind == "mspoe":
        return mspoe_recipe(config)
    return Recipe([method_named(kind)()]) if kind == "distance-aware" else map_recipe(kind, factor)


def released(module, query, key, value, mask, scaling=None, **kwargs):
    """Compute attention as the released Self-Extend does, without its rotations.

    It computes two score matrices and chooses between them.
    """
    groups = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(groups, 1) for tensor in (key, value))
    near, far = query @ key.transpose(2, 3), (query * 1.0) @ (key * 1.0).transpose(2, 3)
    steps = torch.arange(query.shape[2])[:, None] - torch.arange(key.shape[2])
    scores = torch.where(steps < 128, near, far) * scaling
    scores = scores.masked_fill(steps < 0, torch.finfo(scores.dtype).min)
    return (scores.softmax(-1, dtype=torch.float32) @ value).transpose(1, 2).contiguous(), None


def load(folder: Path, attention: str = "sdpa"):
    """Load a model in float32."""
    AttentionInterface.register("released", released)
    return AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=True, dtype=torch.float32, attn_implementation=attention
    ).eval()


def build(folder: Path, device: str, dtype, attention: str):
    """Create a model with random weights from a folder's configuration and code."""
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            config, trust_remote_code=True, dtype=dtype, attn_implementation=attention
        )
    return model.eval()


def tokens(length: int, device: str = "cpu"):
    """Return random token ids (1, length)."""
    return torch.randint(0, 1024, (1, length), generator=torch.Generator().manual_seed(0)).to(device)


def fill(model, total: int, cache=None):
    """Fill a cache with random keys and values for `total` tokens and return it."""
    config, weight = model.config, model.lm_head.weight
    cache = DynamicCache(config=config) if cache is None else cache
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    shape = 2, 1, config.num_key_value_heads, total, width
    torch.manual_seed(0)
    for layer in range(len(model.model.layers)):
        cache.update(*torch.randn(shape, device=weight.device, dtype=weight.dtype).unbind(0), layer)
    # The positions of the tokens, and the positions that their keys are rotated by.
    state_of(cache).rows["positions"] = torch.arange(total, device=weight.device)[None, :, None].repeat(1, 1, 2)
    return cache


def in_turns(steps: dict, rounds: int, clock=time.process_time) -> dict[str, float]:
    """Return the least seconds of each function over all rounds; the functions take turns."""
    best = dict.fromkeys(steps, float("inf"))
    for _ in range(rounds):
        for name, step in steps.items():
            start = clock()
            step()
            best[name] = min(best[name], clock() - start)
    return best


def describe(error: Exception) -> str:
    """Return the class of an error and the first line of its message."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def drop_missing(attentions: list[str]) -> list[str]:
    """Return the installed implementations of attention; print a line for each of the others."""
    installed = []
    for name in attentions:
        try:
            AutoModelForCausalLM.from_config(LlamaConfig(**TINY), attn_implementation=name, dtype=torch.bfloat16)
        except Exception as error:
            print_line({"attention": name, "skipped": describe(error)})
        else:
            installed.append(name)
    return installed


def print_line(line: dict) -> None:
    """Print a line of JSON at once."""
    print(json.dumps(line), flush=True)


def peak(folder: Path, length: int, attention: str = "sdpa") -> float:
    """Return the peak memory in MiB of a process that loads a model and prefills once."""
    command = [sys.executable, __file__, str(folder), str(length), attention]
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return float(done.stdout.split()[-1])


def table(columns: dict[str, dict[str, float]]) -> str:
    """Format figures by column and row, each with its ratio to the row "stock"."""
    rows = next(iter(columns.values()))
    lines = [f"{'':12}" + "".join(f"{head:>20}{'':9}" for head in columns)]
    for row in rows:
        pairs = [(column.get(row, float("nan")), column["stock"]) for column in columns.values()]
        lines.append(f"{row:12}" + "".join(f"{value:20.3f} ×{value / stock:<7.3f}" for value, stock in pairs))
    return "\n".join(lines)


if __name__ == "__main__":  # The process of `peak`.
    torch.set_num_threads(1)
    with torch.no_grad():
        load(Path(sys.argv[1]), sys.argv[3])(tokens(int(sys.argv[2])), use_cache=True, logits_to_keep=1)
    status = Path("/proc/self/status").read_text()  # Unlike ru_maxrss, not inherited from the parent.
    print(int(status.split("VmHWM:")[1].split()[0]) / 1024)
