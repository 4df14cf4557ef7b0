"""Methods with code against the unmodified model on an accelerator: prefill, decoding and memory, 8k to 128k tokens.

    python benchmarks/gpu.py [--attention sdpa,flash_attention_2] [--methods dca,mspoe] [--minutes 18] [--out gpu.jsonl]
    python benchmarks/gpu.py --device cpu --shape tiny

Layers of Llama 3.1 8B with random weights in bfloat16: four of its 32, as all are alike. The stock model and a method
take turns; a prefill is the least of three, or the only one where it takes long, a decoding step the least of twenty,
from a cache of random keys and values. Memory is what torch allocates at most in a prefill, beyond the weights. Each
line of the output is JSON: one device, attention and method. Past the time limit cells are left out.
"""

import argparse
import itertools
import json
import platform
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
import transformers
from random_models import MAPS, convert, fill, in_turns, map_recipe, mspoe_recipe, tokens
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from ctxext import __version__

# Sizes, the model's context length, the lengths to measure and the dtype.
SHAPES = {
    "8b": (
        {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 4,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
        },
        4096,
        "8192,16384,32768,65536,131072",
        torch.bfloat16,
    ),
    "tiny": (
        {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
        128,
        "256,512",
        torch.float32,
    ),
}


def build(folder: Path, device: str, dtype, attention: str):
    """Create a model with random weights from a folder's configuration and code."""
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            config, trust_remote_code=True, dtype=dtype, attn_implementation=attention
        )
    return model.eval()


def clock_of(device: str):
    """Return a clock that waits until a device has finished its work."""
    module = getattr(torch, device.split(":")[0])

    def clock() -> float:
        module.synchronize()
        return time.perf_counter()

    return clock


def least(calls: dict, clock) -> dict[str, float]:
    """Return the least seconds of each call in three rounds, or in one if it takes more than ten seconds in total."""
    first = in_turns(calls, 1, clock)
    more = first if sum(first.values()) > 10 else in_turns(calls, 2, clock)
    return {kind: min(first[kind], more[kind]) for kind in calls}


def measure_memory(call, device: str) -> float:
    """Return the peak MiB that torch allocates during a call."""
    module = getattr(torch, device.split(":")[0])
    module.empty_cache()
    module.reset_peak_memory_stats()
    before = module.memory_allocated()
    call()
    return (module.max_memory_allocated() - before) / 2**20


def measure(models: dict, length: int, device: str) -> dict[str, dict[str, float]]:
    """Measure the unmodified model and another one, alternating.

    The figures are the prefill in seconds, a decode step in ms, and memory in MiB (not on a CPU).
    """
    clock, ids, step = clock_of(device), tokens(length, device), tokens(1, device)
    calls = {kind: partial(model, ids, use_cache=True, logits_to_keep=1) for kind, model in models.items()}
    figures = {"prefill_s": least(calls, clock)}
    if device != "cpu":
        figures["memory_mib"] = {kind: measure_memory(call, device) for kind, call in calls.items()}
    steps = {kind: partial(model, step, past_key_values=fill(model, length)) for kind, model in models.items()}
    in_turns(steps, 2, clock)  # The first step rotates all far keys.
    figures["step_ms"] = {kind: 1000 * seconds for kind, seconds in in_turns(steps, 20, clock).items()}
    return figures


def cell(models: dict, kind: str, length: int, device: str) -> dict:
    """Return a method's figures at one length with their ratios to the unmodified model.

    If memory runs out, the row contains an error instead.
    """
    row: dict = {"length": length}
    try:
        figures = measure(models, length, device)
    except torch.OutOfMemoryError:
        return {**row, "error": "out of memory"}
    for name, values in figures.items():
        row |= {name: round(values[kind], 4), f"{name.split('_')[0]}_ratio": round(values[kind] / values["stock"], 4)}
    return row


@torch.no_grad()
def main() -> None:
    """Print and write a line for each attention and method."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda, xpu or cpu.")
    parser.add_argument("--shape", choices=list(SHAPES), default="8b")
    parser.add_argument("--methods", default=",".join([*MAPS, "mspoe"]))
    parser.add_argument("--attention", default="sdpa,flash_attention_2")
    parser.add_argument("--lengths", help="Default: those of the shape.")
    parser.add_argument("--minutes", type=float, default=18, help="Start no new measurement after these minutes.")
    parser.add_argument("--out", type=Path, default=Path("gpu.jsonl"), help="Append lines to this file.")
    options = parser.parse_args()
    started = time.monotonic()
    sizes, window, lengths, dtype = SHAPES[options.shape]
    lengths = [int(length) for length in (options.lengths or lengths).split(",")]
    about = {
        "device": platform.machine() if options.device == "cpu" else getattr(torch, options.device).get_device_name(),
        "model": f"Llama, {options.shape}, {sizes['num_hidden_layers']} layers, {str(dtype).removeprefix('torch.')}",
        "versions": {"ctxext": __version__, "torch": torch.__version__, "transformers": transformers.__version__},
    }
    config = LlamaConfig(**sizes, vocab_size=1024, max_position_embeddings=window)
    with tempfile.TemporaryDirectory() as place:
        folders, missing = Path(place), set()
        config.save_pretrained(folders / "stock")
        for attention, kind in itertools.product(options.attention.split(","), options.methods.split(",")):
            if attention in missing:
                continue
            line = {**about, "attention": attention, "method": kind, "cells": []}
            recipe = mspoe_recipe(config) if kind == "mspoe" else map_recipe(kind, max(lengths) / window)
            convert(folders / kind, config, recipe)
            try:
                models = {name: build(folders / name, options.device, dtype, attention) for name in ("stock", kind)}
            except ImportError as error:
                print(f"Skipping {attention}, which is not installed: {error}", file=sys.stderr)
                missing.add(attention)
                continue
            for length in lengths:
                if time.monotonic() - started < 60 * options.minutes:
                    line["cells"].append(cell(models, kind, length, options.device))
            del models
            print(json.dumps(line), flush=True)
            with options.out.open("a") as file:
                file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
