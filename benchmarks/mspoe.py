"""Cost of Ms-PoE: prefill and decoding of a Llama-shaped random model against the unmodified model, on one thread.

    python benchmarks/mspoe.py [--rounds 5] [--length 4096] [--cached 1024] [--schedule linear] [--only compiled]

Times are processor seconds of one thread, the smallest of many rounds that take turns within one process: other work
on the machine disturbs them little. With "--only compiled" the models are compiled and their cache is static. Peak
memory is that of a process which does nothing but one prefill, with large blocks given back to the system at once: the
C library's heap would otherwise add a share that differs from run to run.
"""

import argparse
import os
import tempfile
from functools import partial
from pathlib import Path

import torch
from random_models import convert, in_turns, load, mspoe_recipe, peak, table, tokens
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

SIZES = {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 8, "num_attention_heads": 8}
KINDS = ["stock", "calibrated", "prompt"]


def make(root: Path, schedule: str) -> dict[str, Path]:
    """Write the unmodified model and its conversions, which link its weights."""
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, vocab_size=1024, max_position_embeddings=4096)
    LlamaForCausalLM(config).save_pretrained(root / "stock")
    for kind in KINDS[1:]:
        convert(root / kind, config, mspoe_recipe(config, kind, schedule))
        os.link(root / "stock" / "model.safetensors", root / kind / "model.safetensors")
    return {kind: root / kind for kind in KINDS}


def time_decode(models: dict, cached: int, rounds: int, is_compiled: bool) -> dict[str, float]:
    """Return the least milliseconds of a decode step after a prompt, by model."""
    steps, step = {}, tokens(1)
    for kind, model in models.items():
        room = StaticCache(config=model.config, max_cache_len=cached + rounds) if is_compiled else None
        cache = model(tokens(cached), past_key_values=room, use_cache=True, logits_to_keep=1).past_key_values
        called = torch.compile(model, fullgraph=True, dynamic=False) if is_compiled else model
        steps[kind] = partial(called, step, past_key_values=cache)
    return {kind: 1000 * seconds for kind, seconds in in_turns(steps, rounds).items()}


@torch.no_grad()
def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--cached", type=int, default=1024)
    parser.add_argument("--schedule", default="linear")
    parser.add_argument("--only", choices=["prefill", "decode", "compiled", "memory"], help="Measure only this.")
    options = parser.parse_args()
    torch.set_num_threads(1)
    columns: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as name:
        folders = make(Path(name), options.schedule)
        models = {kind: load(folder) for kind, folder in folders.items()}
        if options.only in (None, "prefill"):
            ids = tokens(options.length)
            calls = {kind: partial(model, ids, use_cache=True, logits_to_keep=1) for kind, model in models.items()}
            columns[f"prefill {options.length}, s"] = in_turns(calls, options.rounds)
        if options.only in (None, "decode", "compiled"):
            is_compiled = options.only == "compiled"
            columns[f"step at {options.cached}, ms"] = time_decode(
                models, options.cached, 60 * options.rounds, is_compiled
            )
        del models
        if options.only in (None, "memory"):
            columns["peak, MiB"] = {kind: peak(folder, options.length) for kind, folder in folders.items()}
    print(f"torch {torch.__version__}, one thread, float32, {SIZES}, schedule {options.schedule}")
    print(table(columns))


if __name__ == "__main__":
    main()
