"""What Ms-PoE costs: prefill and decoding of a Llama-shaped random model beside the stock model, on one thread.

    python benchmarks/mspoe.py [--rounds 5] [--length 4096] [--cached 1024] [--schedule linear]

Times are processor seconds of one thread, the smallest of many rounds that take turns within one process: other work
on the machine disturbs them little. Peak memory is that of a process which does nothing but one prefill, with large
blocks given back to the system at once: the C library's heap would otherwise add a share that differs from run to run.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, logging

from ctxext.recipes import MsPoE, Recipe
from ctxext.recipes.encodings.rotary import model_config

LAYERS = HEADS = 8
KINDS = ["stock", "calibrated", "prompt"]


def make(root: Path, schedule: str) -> None:
    """Write the stock model and its conversions, which link its weights."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=1024, max_position_embeddings=4096))
    model.save_pretrained(root / "stock")
    config = json.loads((root / "stock" / "config.json").read_text())
    orders = [random.Random(layer).sample(range(HEADS), HEADS) for layer in range(LAYERS)]
    model = model_config(config)
    for kind in KINDS[1:]:
        shutil.copytree(root / "stock", root / kind, copy_function=os.link)
        (root / kind / "config.json").unlink()
        ranks = tuple(map(tuple, orders)) if kind == "calibrated" else None
        recipe = Recipe([MsPoE(head_order=kind, ranks=ranks, first_layer=0, schedule=schedule)])
        (root / kind / "config.json").write_text(json.dumps(recipe.edit(model).config))
        for file, text in recipe.code_files(config).items():
            (root / kind / file).write_text(text)


def load(folder: Path):
    """Load a model with the attention that both sides use."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=True, dtype=torch.float32, attn_implementation="sdpa"
    )
    return model.eval()


def tokens(length: int):
    """Random token ids (1, length)."""
    return torch.randint(0, 1024, (1, length), generator=torch.Generator().manual_seed(0))


def prefill(model, length: int) -> float:
    """Processor seconds of one prefill."""
    start = time.process_time()
    model(tokens(length), use_cache=True, logits_to_keep=1)
    return time.process_time() - start


def decode(model, cache, steps: int = 8) -> float:
    """Processor seconds of one decoding step."""
    step = tokens(1)
    start = time.process_time()
    for _ in range(steps):
        model(step, past_key_values=cache)
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
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--cached", type=int, default=1024)
    parser.add_argument("--schedule", default="linear")
    parser.add_argument("--peak-of", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if options.peak_of:
        prefill(load(options.peak_of), options.length)
        status = Path("/proc/self/status").read_text()  # Unlike ru_maxrss, not inherited from the parent.
        print(int(status.split("VmHWM:")[1].split()[0]) / 1024)
        return
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        make(root, options.schedule)
        models = {kind: load(root / kind) for kind in KINDS}
        caches = {
            kind: model(tokens(options.cached), use_cache=True, logits_to_keep=1).past_key_values
            for kind, model in models.items()
        }
        times = {kind: ([], []) for kind in KINDS}
        for _ in range(options.rounds):
            for kind, model in models.items():
                times[kind][0].append(prefill(model, options.length))
            for _ in range(12):
                for kind, model in models.items():
                    times[kind][1].append(decode(model, caches[kind]))
        del models, caches
        peaks = {kind: peak(root / kind, options.length) for kind in KINDS}
    print(f"torch {torch.__version__}, one thread, float32, width 512, 8 layers, 8 heads, schedule {options.schedule}")
    heads = [f"prefill {options.length}, s", f"decode at {options.cached}, ms", "peak, MiB"]
    print(f"{'':12}" + "".join(f"{head:>20}{'':9}" for head in heads))
    base = [*(min(values) for values in times["stock"]), peaks["stock"]]
    for kind in KINDS:
        values = [*(min(seconds) for seconds in times[kind]), peaks[kind]]
        cells = [f"{values[0]:20.3f}", f"{1000 * values[1]:20.3f}", f"{values[2]:20.1f}"]
        ratios = [f" ×{a / b:<7.3f}" for a, b in zip(values, base, strict=True)]
        print(f"{kind:12}" + "".join(cell + ratio for cell, ratio in zip(cells, ratios, strict=True)))


if __name__ == "__main__":
    main()
