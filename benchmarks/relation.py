"""Cost of relation maps: prefill beyond and within the window, decoding and peak memory against the unmodified model.

    python benchmarks/relation.py [--rounds 3] [--methods self-extend,dca] [--shape small|135m]
    python benchmarks/relation.py --only decode [--cached 4096,32768]

Converted checkpoints of a random Llama, one thread, sdpa. Times are processor seconds, the smallest of rounds in which
the models take turns within one process: other work on the machine disturbs them little. Decoding starts from caches of
random keys and values, of two layers from 16384 tokens on; a round is 16 steps. Peak memory is that of a process that
does nothing but one prefill, with large blocks given back to the system at once. For scale, "eager" computes
Self-Extend as it was released: two score matrices of all rows and keys, and a choice between them.
"""

import argparse
import os
import tempfile
from functools import partial
from pathlib import Path

import torch
from random_models import MAPS, convert, fill, in_turns, load, map_recipe, peak, table, tokens
from transformers import LlamaConfig, LlamaForCausalLM

# Sizes, the model's context length, and the prompt's length.
SHAPES = {
    "small": (
        {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 8, "num_attention_heads": 8},
        1024,
        4096,
    ),
    "135m": (
        {
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
        },
        8192,
        12288,
    ),
}


def make(root: Path, shape: str, kinds: list[str]) -> dict[str, Path]:
    """Write the unmodified model and its conversions, which link its weights."""
    sizes, length, total = SHAPES[shape]
    torch.manual_seed(0)
    config = LlamaConfig(**sizes, vocab_size=1024, max_position_embeddings=length)
    LlamaForCausalLM(config).save_pretrained(root / "stock")
    for kind in set(kinds) & set(MAPS):
        convert(root / kind, config, map_recipe(kind, total / length))
        os.link(root / "stock" / "model.safetensors", root / kind / "model.safetensors")
    return {kind: root / ("stock" if kind == "eager" else kind) for kind in kinds}


def time_prefill(models: dict, length: int, rounds: int) -> dict[str, float]:
    """Return the least seconds of a prefill, by model."""
    ids = tokens(length)
    return in_turns({k: partial(model, ids, use_cache=True, logits_to_keep=1) for k, model in models.items()}, rounds)


def time_decode(models: dict, total: int, rounds: int) -> dict[str, float]:
    """Return the least milliseconds of a decode step, by model; from 16384 tokens on with two layers."""
    for model in models.values() if total >= 16384 else ():
        del model.model.layers[2:]
    step = tokens(1)
    steps = {kind: partial(model, step, past_key_values=fill(model, total)) for kind, model in models.items()}
    return {kind: 1000 * seconds for kind, seconds in in_turns(steps, 16 * rounds).items()}


@torch.no_grad()
def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--methods", default=",".join([*MAPS, "eager"]))
    parser.add_argument("--shape", choices=list(SHAPES), default="small")
    parser.add_argument("--only", choices=["prefill", "decode", "memory"], help="Measure only this.")
    parser.add_argument("--cached", default="4096,32768", help="Lengths of the caches that decoding starts from.")
    options = parser.parse_args()
    torch.set_num_threads(1)
    sizes, length, total = SHAPES[options.shape]
    kinds = ["stock", *options.methods.split(",")]
    if options.only == "decode" or total > 4096:
        kinds = [kind for kind in kinds if kind != "eager"]
    columns: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as name:
        folders = make(Path(name), options.shape, kinds)
        attention = {kind: "released" if kind == "eager" else "sdpa" for kind in kinds}
        models = {kind: load(folder, attention[kind]) for kind, folder in folders.items()}
        if options.only in (None, "prefill"):
            columns[f"prefill {total}, s"] = time_prefill(models, total, options.rounds)
            columns[f"inside, {length}, s"] = time_prefill(models, length, options.rounds)
        if options.only in (None, "decode"):
            models.pop("eager", None)
            for cached in map(int, options.cached.split(",")):
                columns[f"step at {cached}, ms"] = time_decode(models, cached, options.rounds)
        del models
        if options.only in (None, "memory"):
            columns["peak, MiB"] = {kind: peak(folders[kind], total, attention[kind]) for kind in kinds}
    print(f"torch {torch.__version__}, one thread, float32, {sizes}, window {length}")
    print(table(columns))


if __name__ == "__main__":
    main()
