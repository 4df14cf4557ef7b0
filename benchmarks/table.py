"""Lengthening the position table of a 1.2 GB checkpoint: `ctxext convert` against load, edit and `save_pretrained`.

    python benchmarks/table.py [--rounds 3] [--shards]

Each side runs in a separate process, in turn; the least time and the peak resident memory of each are shown. One file
is the worst case, as all of it is streamed; with --shards the others are brought as they always are.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from convert import measure

CTXEXT = (
    "from ctxext.api import Recipe, convert\n"
    "from ctxext.recipes.methods.table import Table\n"
    "convert(source, out, Recipe([Table(factor=4, fill='linear')]))\n"
)
PLAIN = (
    "import torch\n"
    "from transformers import AutoModelForMaskedLM\n"
    "model = AutoModelForMaskedLM.from_pretrained(source)\n"
    "table = model.roberta.embeddings.position_embeddings\n"
    "old = table.weight.detach()\n"
    "new = torch.cat([old[:2], old[2:].repeat(4, 1)])\n"
    "model.roberta.embeddings.position_embeddings = torch.nn.Embedding.from_pretrained(new, padding_idx=1)\n"
    "model.config.max_position_embeddings = len(new)\n"
    "model.save_pretrained(out)\n"
)
SIDES = {"ctxext": CTXEXT, "load, edit, save_pretrained": PLAIN}


def make_source(folder: Path, size: str) -> None:
    """Save a random float32 RoBERTa of 1.2 GB, in shards of at most `size`."""
    script = (
        "import torch\nfrom transformers import RobertaConfig, RobertaForMaskedLM\n"
        "config = RobertaConfig(hidden_size=1024, intermediate_size=4096, num_hidden_layers=20,\n"
        "                       num_attention_heads=16, vocab_size=50265, max_position_embeddings=514)\n"
        f"RobertaForMaskedLM(config).save_pretrained({str(folder)!r}, max_shard_size={size!r})\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shards", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        source, out = Path(folder) / "source", Path(folder) / "out"
        make_source(source, "400MB" if given.shards else "4GB")
        files = list(source.glob("*.safetensors"))
        size = sum(path.stat().st_size for path in files)
        results = {name: [measure(body, source, out) for _ in range(given.rounds)] for name, body in SIDES.items()}
    best = {name: (min(row[0] for row in rows), max(row[1] for row in rows)) for name, rows in results.items()}
    print(f"{size / 1e9:.2f} GB in {len(files)} file(s), {given.rounds} rounds, least time, largest peak")
    for name, (seconds, memory) in best.items():
        print(f"{name:32}{seconds:10.2f} s{memory:10.0f} MB")
    ratio = best["ctxext"][0] / best["load, edit, save_pretrained"][0]
    print(json.dumps({"time_ratio": round(ratio, 4), "ctxext_peak_mb": round(best["ctxext"][1])}))


if __name__ == "__main__":
    main()
