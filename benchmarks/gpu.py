"""Cost of methods with code on an accelerator, against the unmodified model: prefill, decode steps and memory.

    python benchmarks/gpu.py [--attention sdpa,flash_attention_2] [--methods dca,mspoe] [--lengths 8192,32768]
    python benchmarks/gpu.py --shape gemma3 --piece 4096
    python benchmarks/gpu.py --device cpu --shape tiny

Layers of Llama 3.1 8B or Gemma 3 12B with random weights in bfloat16: four of 32, or six of 48, as the others are
alike. The unmodified model ("stock") and a method take turns; a prefill is the least of three, or the only one if it is
slow, a decode step the least of twenty, from a cache of random keys and values. Memory is the peak that torch allocates
in a prefill, beyond the weights. Prints a line of JSON for each length, attention and method.
"""

import argparse
import itertools
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
from random_models import MAPS, build, convert, describe, drop_missing, fill, in_turns, print_line, recipe_of, tokens
from transformers import AutoConfig, DynamicCache

# Model type and sizes, the model's context length, the lengths to measure and the dtype.
SHAPES = {
    "8b": (
        {
            "model_type": "llama",
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 4,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
        },
        4096,
        "8192,32768,131072",
        torch.bfloat16,
    ),
    "gemma3": (  # One layer in six has full attention.
        {
            "model_type": "gemma3_text",
            "architectures": ["Gemma3ForCausalLM"],
            "hidden_size": 3840,
            "intermediate_size": 15360,
            "num_hidden_layers": 6,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 256,
            "sliding_window": 1024,
        },
        4096,
        "8192,32768,131072",
        torch.bfloat16,
    ),
    "tiny": (
        {
            "model_type": "llama",
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
        },
        128,
        "256,512",
        torch.float32,
    ),
    "tiny-gemma3": (
        {
            "model_type": "gemma3_text",
            "architectures": ["Gemma3ForCausalLM"],
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 6,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "sliding_window": 64,
        },
        128,
        "256,512",
        torch.float32,
    ),
}


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


def measure_steps(models: dict, length: int, device: str) -> dict[str, float]:
    """Return the least milliseconds of a decode step, by model."""
    clock, step = clock_of(device), tokens(1, device)
    steps = {kind: partial(model, step, past_key_values=fill(model, length)) for kind, model in models.items()}
    in_turns(steps, 2, clock)  # The first step rotates all far keys.
    return {kind: 1000 * seconds for kind, seconds in in_turns(steps, 20, clock).items()}


def prefill(model, ids, piece: int | None = None):
    """Return the logits of the last token, after a prefill in one call or in pieces."""
    cache = DynamicCache(config=model.config)
    for part in ids.split(piece or ids.shape[1], dim=1):
        logits = model(part, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
    return logits


def compare_pieces(models: dict, ids, piece: int) -> dict[str, float]:
    """Return the difference of the last logits between pieces and one call, relative to the largest logit."""
    logits = {kind: [prefill(model, ids, size).float() for size in (None, piece)] for kind, model in models.items()}
    return {kind: float((whole - parts).abs().max() / whole.abs().max()) for kind, (whole, parts) in logits.items()}


def list_figures(models: dict, length: int, piece: int | None, device: str) -> dict:
    """Return functions that measure all models, by the name of the figure."""
    clock, ids = clock_of(device), tokens(length, device)
    figures = {}
    for name, size in {"prefill": None, "pieces": piece}.items() if piece else [("prefill", None)]:
        calls = {kind: partial(prefill, model, ids, size) for kind, model in models.items()}
        figures[f"{name}_s"] = partial(least, calls, clock)
        if device != "cpu":
            figures[f"{name}_memory_mib"] = lambda calls=calls: {
                kind: measure_memory(call, device) for kind, call in calls.items()
            }
    if piece:
        figures["pieces_difference"] = partial(compare_pieces, models, ids, piece)
    return {**figures, "step_ms": partial(measure_steps, models, length, device)}


def measure(models: dict, kind: str, length: int, piece: int | None, device: str) -> dict:
    """Return a method's figures at one length, those of the unmodified model, and their ratios.

    A figure that fails, for example because memory runs out, is an error instead.
    """
    row: dict = {}
    for name, figure in list_figures(models, length, piece, device).items():
        try:
            values = figure()
        except Exception as error:
            row[name] = describe(error)
            continue
        row |= {name: round(values[kind], 6), f"stock_{name}": round(values["stock"], 6)}
        if name != "pieces_difference":
            row[f"{name.rpartition('_')[0]}_ratio"] = round(values[kind] / values["stock"], 4)
    return row


@torch.no_grad()
def main() -> None:
    """Print a line for each length, attention and method."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda, xpu or cpu.")
    parser.add_argument("--shape", choices=list(SHAPES), default="8b")
    parser.add_argument("--methods", default=",".join([*MAPS, "mspoe"]))
    parser.add_argument("--attention", default="sdpa,flash_attention_2")
    parser.add_argument("--lengths", help="Default: those of the shape.")
    parser.add_argument("--piece", type=int, help="Also prefill in pieces of so many tokens.")
    options = parser.parse_args()
    sizes, window, lengths, dtype = SHAPES[options.shape]
    lengths = [int(length) for length in (options.lengths or lengths).split(",")]
    config = AutoConfig.for_model(**sizes, vocab_size=1024, max_position_embeddings=window, bos_token_id=None)
    about = {"shape": options.shape, "layers": config.num_hidden_layers, "dtype": str(dtype).removeprefix("torch.")}
    with tempfile.TemporaryDirectory() as place:
        folders = Path(place)
        config.save_pretrained(folders / "stock")
        # Short lengths first, so that a run that is stopped has figures of every method.
        for length, attention, kind in itertools.product(
            lengths, drop_missing(options.attention.split(",")), options.methods.split(",")
        ):
            convert(folders / kind, config, recipe_of(kind, config, max(lengths) / window))
            line = {**about, "attention": attention, "method": kind, "length": length}
            models = {name: build(folders / name, options.device, dtype, attention) for name in ("stock", kind)}
            print_line(line | measure(models, kind, length, options.piece, options.device))
            del models


if __name__ == "__main__":
    main()
