"""What relation maps cost in a whole model: prefill past the window and inside it, decoding, memory; on one thread.

    python benchmarks/relation_model.py [--rounds 3] [--methods self-extend,dca] [--large]

Loaded checkpoints as `ctxext convert` writes them, beside the stock model with sdpa, in one process by turns. Times are
processor seconds, the smallest of all rounds. `--large` takes the shape of a 135M model with a window of 8192 tokens
and reads 12288. For scale, "eager self-extend" keeps two whole score matrices, as the released code does.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from transformers import AttentionInterface, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, logging

from ctxext.recipes import Recipe
from ctxext.recipes.recipe import step_from_dict
from ctxext.recipes.rotary import model_config

SMALL = {
    "hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 8, "num_attention_heads": 8, "vocab_size": 1024,
    "max_position_embeddings": 1024,
}  # fmt: skip
LARGE = {
    "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "vocab_size": 49152, "max_position_embeddings": 8192, "rope_theta": 1e5,
    "tie_word_embeddings": True,
}  # fmt: skip
METHODS = ["self-extend", "bifocal", "dca", "rerope", "adaptive", "string", "sinks"]
EAGER = "eager self-extend"


def make(root: Path, sizes: dict, names: list[str]) -> None:
    """Write the stock model and its conversions, which link its weights."""
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(root / "stock")
    config = json.loads((root / "stock" / "config.json").read_text())
    for name in names:
        (root / name).mkdir()
        model = model_config(config)
        recipe = Recipe([step_from_dict({"method": name, "factor": 1.2 if name == "string" else 4}, name)]).resolved(
            model
        )
        (root / name / "config.json").write_text(json.dumps(recipe.edit(model).config))
        for file, text in recipe.code_files(config).items():
            (root / name / file).write_text(text)
        os.link(root / "stock" / "model.safetensors", root / name / "model.safetensors")


def load(folder: Path, attention: str = "sdpa"):
    """Load a model with the attention that both sides use."""
    return AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=True, dtype=torch.float32, attn_implementation=attention
    ).eval()


def two_matrices(module, query, key, value, mask, scaling, **kwargs):
    """Self-Extend's way with eager attention: both score matrices whole, and one chosen for every pair."""
    groups = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(groups, 1) for tensor in (key, value))
    near, far = query @ key.mT, query @ key.mT
    steps = torch.arange(query.shape[2])[:, None] - torch.arange(key.shape[2])
    scores = torch.where(steps < 128, near, far).mul_(scaling).masked_fill_(steps < 0, torch.finfo(near.dtype).min)
    return (scores.softmax(-1) @ value).transpose(1, 2).contiguous(), None


def prefill(model, length: int) -> float:
    """Processor seconds of one prefill."""
    ids = torch.randint(0, 1024, (1, length), generator=torch.Generator().manual_seed(0))
    start = time.process_time()
    model(ids, use_cache=True, logits_to_keep=1)
    return time.process_time() - start


def decode(model, cache, steps: int = 16) -> float:
    """Processor seconds of one decoding step."""
    start = time.process_time()
    for _ in range(steps):
        model(torch.tensor([[7]]), past_key_values=cache)
    return (time.process_time() - start) / steps


def peak(folder: Path, length: int) -> float:
    """Peak memory in MiB of a process that loads a model and prefills once."""
    command = [sys.executable, __file__, "--peak-of", str(folder), "--length", str(length)]
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return float(done.stdout.split()[-1])


@torch.no_grad()
def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--length", type=int)
    parser.add_argument("--peak-of", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if options.peak_of:
        prefill(load(options.peak_of), options.length)
        status = Path("/proc/self/status").read_text()
        print(int(status.split("VmHWM:")[1].split()[0]) / 1024)
        return
    sizes, names = (LARGE if options.large else SMALL), options.methods.split(",")
    window = sizes["max_position_embeddings"]
    length = options.length or (12288 if options.large else 4 * window)
    AttentionInterface.register("two_matrices", two_matrices)
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        make(root, sizes, names)
        models = {kind: load(root / kind) for kind in ["stock", *names]}
        if not options.large:
            models[EAGER] = load(root / "stock", "two_matrices")
        times = {kind: ([], [], []) for kind in models}
        for _ in range(options.rounds):
            for kind, model in models.items():
                times[kind][0].append(prefill(model, length))
                times[kind][1].append(prefill(model, window))
        if not options.large:
            ids = torch.randint(0, 1024, (1, length))
            caches = {
                kind: models[kind](ids, use_cache=True, logits_to_keep=1).past_key_values
                for kind in models
                if kind != EAGER
            }
            for _ in range(4 * options.rounds):
                for kind, cache in caches.items():
                    times[kind][2].append(decode(models[kind], cache))
        del models
        peaks = {kind: peak(root / kind, length) for kind in ["stock", *names]} if not options.large else {}
    shape = f"{sizes['num_hidden_layers']} layers of {sizes['hidden_size']}, window {window}"
    print(
        f"torch {torch.__version__}, one thread, float32, {shape}; ratios to stock, smallest of {options.rounds} rounds"
    )
    print(f"{'':18}{f'prefill {length}':>16}{f'inside {window}':>16}{f'decode at {length}':>18}{'peak':>10}")
    base = [min(values) if values else 0.0 for values in times["stock"]]
    print(f"{'stock':18}{base[0]:14.2f} s{base[1]:14.2f} s{1000 * base[2]:15.2f} ms{peaks.get('stock', 0):7.0f} MiB")
    for kind in times:
        if kind != "stock":
            cells = [
                f"{min(own) / one:.3f}" if own and one else "-" for own, one in zip(times[kind], base, strict=True)
            ]
            memory = f"{peaks[kind] / peaks['stock']:.3f}" if kind in peaks else "-"
            print(f"{kind:18}{cells[0]:>16}{cells[1]:>16}{cells[2]:>18}{memory:>10}")


if __name__ == "__main__":
    main()
