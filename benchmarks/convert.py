"""Converting a 1.2 GB sharded checkpoint: `ctxext convert` against load, edit and `save_pretrained`.

    python benchmarks/convert.py [--rounds 3]

The sides alternate, each in a separate process including its start. The table shows the least time, the least CPU time
and the largest peak of resident memory. "asked" is a conversion that tests the rotation of the transformers class, as
for classes without a record in `ctxext.verify.rotary_classes`. The last row is the command on the demo.
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

CTXEXT = (
    "from ctxext.api import Recipe, convert\nfrom ctxext.methods import Yarn\n"
    "convert(source, out, Recipe([Yarn(factor=4)]))\n"
)
ASKED = "from ctxext.verify import rotary_classes\nrotary_classes.read_measurements = dict\n" + CTXEXT
DEMO = (
    "import sys\nfrom ctxext.cli.app import main\n"
    "sys.argv = ['ctxext', 'convert', 'demo', out, '--method', 'yarn', '--factor', '4']\nmain()\n"
)
PLAIN = (
    "from transformers import AutoConfig, AutoModelForCausalLM\n"
    "config = AutoConfig.from_pretrained(source)\n"
    "config.rope_parameters = {'rope_type': 'yarn', 'factor': 4.0, 'rope_theta': 10000.0,\n"
    "                          'original_max_position_embeddings': 4096}\n"
    "config.max_position_embeddings = 16384\n"
    "AutoModelForCausalLM.from_pretrained(source, config=config).save_pretrained(out, max_shard_size='400MB')\n"
)


def make_source(folder: Path) -> None:
    """Save a random bf16 Llama of 1.2 GB in four shards."""
    script = (
        "import torch\nfrom transformers import LlamaConfig, LlamaForCausalLM\n"
        "torch.set_default_dtype(torch.bfloat16)\n"
        "config = LlamaConfig(hidden_size=2048, intermediate_size=5632, num_hidden_layers=11, num_attention_heads=16,\n"
        "                     num_key_value_heads=4, vocab_size=32000, max_position_embeddings=4096)\n"
        f"LlamaForCausalLM(config).save_pretrained({str(folder)!r}, max_shard_size='400MB')\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def measure(body: str, source: Path, out: Path) -> tuple[float, float, float]:
    """Return the seconds, CPU seconds and peak resident MB of a process that runs `body`, including its start."""
    script = f"source, out = {str(source)!r}, {str(out)!r}\n{body}"
    started = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - started
    assert status == 0, "the measured process failed"
    shutil.rmtree(out)
    return seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        source, out = Path(folder) / "source", Path(folder) / "out"
        make_source(source)
        size = sum(path.stat().st_size for path in source.glob("*.safetensors"))
        shards = len(list(source.glob("*.safetensors")))
        results = {name: [measure(body, source, out) for _ in range(rounds)] for name, body in SIDES.items()}
    best = {
        name: (min(row[0] for row in rows), min(row[1] for row in rows), max(row[2] for row in rows))
        for name, rows in results.items()
    }
    print(f"{size / 1e9:.2f} GB in {shards} shards, {rounds} rounds, least times, largest peak")
    print(f"{'':32}{'seconds':>10}{'processor':>11}{'peak MB':>10}")
    for name, (seconds, processor, memory) in best.items():
        print(f"{name:32}{seconds:10.2f}{processor:11.2f}{memory:10.0f}")
    mine, plain = best["ctxext"], best["load, edit, save_pretrained"]
    ratios = {"time_ratio": mine[0] / plain[0], "processor_ratio": mine[1] / plain[1]}
    print(json.dumps({**{key: round(ratio, 4) for key, ratio in ratios.items()}, "ctxext_peak_mb": round(mine[2])}))


SIDES = {"ctxext": CTXEXT, "ctxext, asked": ASKED, "load, edit, save_pretrained": PLAIN, "ctxext convert demo": DEMO}

if __name__ == "__main__":
    main()
