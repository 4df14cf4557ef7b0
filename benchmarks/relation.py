"""What relation maps cost: prefill past the window and inside it, decoding and peak memory beside the stock model.

    python benchmarks/relation.py [--rounds 3] [--methods self-extend,dca] [--shape small|135m] [--cached 32768]

Converted checkpoints of a random Llama, one thread, sdpa. Times are processor seconds, the smallest of rounds in which
all models take turns within one process: other work on the machine disturbs them little. Long caches are filled with
random keys and values, and only the stock model and one other take turns, so that both fit into memory. Peak memory is
that of a process that does nothing but one prefill, with large blocks given back to the system at once. For scale,
"eager" computes Self-Extend as it was released: two score matrices of all rows and keys, and a choice between them.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    logging,
)

from ctxext.recipes import METHODS, Recipe
from ctxext.recipes.encodings.rotary import model_config

# Sizes, the context length that the model has, and the prompt's length.
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
NAMES = ["self-extend", "bifocal", "dca", "rerope", "string", "sinks", "window", "adaptive"]
KINDS = ["stock", *NAMES, "eager"]
NAN = float("nan")


def make(root: Path, shape: str, kinds: list[str]) -> None:
    """Write the stock model and its conversions, which link its weights."""
    sizes, length, total = SHAPES[shape]
    torch.manual_seed(0)
    config = LlamaConfig(**sizes, vocab_size=1024, max_position_embeddings=length)
    LlamaForCausalLM(config).save_pretrained(root / "stock")
    config = json.loads((root / "stock" / "config.json").read_text())
    by_name = {method.name: method for method in METHODS}
    for kind in kinds:
        if kind not in by_name:
            continue
        shutil.copytree(root / "stock", root / kind, copy_function=os.link)
        (root / kind / "config.json").unlink()
        # STRING hardly extends: its target is what it reaches, though rows go on by its rule.
        factor = 1.2 if kind == "string" else total / length
        recipe = Recipe([by_name[kind](factor=factor)])
        (root / kind / "config.json").write_text(json.dumps(recipe.edit(model_config(config)).config))
        for file, text in recipe.code_files(config).items():
            (root / kind / file).write_text(text)


def released(module, query, key, value, mask, scaling=None, **kwargs):
    """Self-Extend as it was released, but for the rotations: two score matrices and a choice."""
    groups = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(groups, 1) for tensor in (key, value))
    near, far = query @ key.transpose(2, 3), (query * 1.0) @ (key * 1.0).transpose(2, 3)
    steps = torch.arange(query.shape[2])[:, None] - torch.arange(key.shape[2])
    scores = torch.where(steps < 128, near, far) * scaling
    scores = scores.masked_fill(steps < 0, torch.finfo(scores.dtype).min)
    return (scores.softmax(-1, dtype=torch.float32) @ value).transpose(1, 2).contiguous(), None


def load(root: Path, kind: str):
    """Load a model."""
    AttentionInterface.register("released", released)
    folder = root / ("stock" if kind == "eager" else kind)
    implementation = "released" if kind == "eager" else "sdpa"
    return AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=True, dtype=torch.float32, attn_implementation=implementation
    ).eval()


def tokens(length: int):
    """Random token ids (1, length)."""
    return torch.randint(0, 1024, (1, length), generator=torch.Generator().manual_seed(0))


def prefill(model, length: int) -> tuple[float, object]:
    """Processor seconds of one prefill, and its cache."""
    start = time.process_time()
    cache = model(tokens(length), use_cache=True, logits_to_keep=1).past_key_values
    return time.process_time() - start, cache


def decode(model, cache, steps: int = 16) -> float:
    """Processor seconds of one decoding step, after one that turns the keys."""
    step = tokens(1)
    model(step, past_key_values=cache)
    start = time.process_time()
    for _ in range(steps):
        model(step, past_key_values=cache)
    return (time.process_time() - start) / steps


def peak(root: Path, kind: str, length: int) -> float:
    """Peak memory in MiB of a process that loads a model and prefills once."""
    command = [sys.executable, __file__, "--peak-of", str(root), "--methods", kind, "--length", str(length)]
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return float(done.stdout.split()[-1])


def measured(models: dict, length: int, total: int, rounds: int) -> dict[str, list[float]]:
    """For each kind the best seconds of a prefill past the window, of one inside, and of a decoding step."""
    times: dict[str, list[list[float]]] = {kind: [[], [], []] for kind in models}
    for _ in range(rounds):
        for kind, model in models.items():
            if kind == "eager" and total > 4096:
                continue
            seconds, cache = prefill(model, total)
            times[kind][0].append(seconds)
            if kind != "eager":
                times[kind][2].append(decode(model, cache))
            times[kind][1].append(prefill(model, length)[0])
    return {kind: [min(seconds, default=NAN) for seconds in columns] for kind, columns in times.items()}


def filled(model, total: int):
    """A cache of random keys and values."""
    config, cache = model.config, DynamicCache(config=model.config)
    shape = 2, 1, config.num_key_value_heads, total, config.hidden_size // config.num_attention_heads
    for layer in range(config.num_hidden_layers):
        states = torch.randn(shape, generator=torch.Generator().manual_seed(layer))
        cache.update(*states.unbind(0), layer)
    return cache


def decoded(models: dict, kind: str, total: int, rounds: int) -> tuple[float, float]:
    """The best seconds of a decoding step of one kind at a length, and those of the stock model in the same turns."""
    kinds = [kind] if kind == "stock" else ["stock", kind]
    caches = {name: filled(models[name], total) for name in kinds}
    best = dict.fromkeys(kinds, float("inf"))
    for _ in range(rounds):
        for name in kinds:
            best[name] = min(best[name], decode(models[name], caches[name]))
    return best[kind], best["stock"]


@torch.no_grad()
def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--methods", default=",".join(KINDS))
    parser.add_argument("--shape", choices=list(SHAPES), default="small")
    parser.add_argument("--cached", type=int, default=32768, help="The length of the long cache; 0 leaves it out.")
    parser.add_argument("--length", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--peak-of", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if options.peak_of:
        prefill(load(options.peak_of, options.methods), options.length)
        status = Path("/proc/self/status").read_text()  # Unlike ru_maxrss, not inherited from the parent.
        print(int(status.split("VmHWM:")[1].split()[0]) / 1024)
        return
    sizes, length, total = SHAPES[options.shape]
    kinds = ["stock", *(kind for kind in options.methods.split(",") if kind != "stock")]
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        make(root, options.shape, kinds)
        models = {kind: load(root, kind) for kind in kinds}
        columns = measured(models, length, total, options.rounds)
        table = {kind: list(zip(columns[kind], columns["stock"], strict=True)) for kind in kinds}
        for kind in kinds:
            skipped = kind == "eager" or not options.cached
            table[kind].append((NAN, NAN) if skipped else decoded(models, kind, options.cached, options.rounds))
        del models
        peaks = {kind: NAN if kind == "eager" and total > 4096 else peak(root, kind, total) for kind in kinds}
        for kind in kinds:
            table[kind].append((peaks[kind], peaks["stock"]))
    print(f"torch {torch.__version__}, one thread, float32, {sizes}, window {length}")
    heads = [f"prefill {total}, s", f"inside, {length}, s", f"step at {total}, ms", f"step at {options.cached}, ms"]
    heads.append("peak, MiB")
    print(f"{'':12}" + "".join(f"{head:>20}{'':9}" for head in heads))
    for kind in kinds:
        cells = zip(table[kind], (1, 1, 1000, 1000, 1), strict=True)
        print(f"{kind:12}" + "".join(f"{value * unit:20.3f} ×{value / base:<7.3f}" for (value, base), unit in cells))


if __name__ == "__main__":
    main()
