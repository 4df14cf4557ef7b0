"""Every method on the demo checkpoint, at its original context length and beyond: the figures under docs/results.

python benchmarks/methods.py docs/results
"""

import argparse
from pathlib import Path

from rich.console import Console

from ctxext.api import compare
from ctxext.methods import MsPoE, Ntk, NtkByParts, PositionInterpolation, Yarn
from ctxext.models.model import Loading

FACTOR = 4.0
METHODS = {
    "pi": PositionInterpolation(factor=FACTOR),
    "ntk": Ntk(factor=FACTOR),
    "ntk-by-parts": NtkByParts(factor=FACTOR),
    "yarn": Yarn(factor=FACTOR),
    "mspoe": MsPoE(),
    "mspoe-layer-0": MsPoE(first_layer=0),
    "mspoe-paper": MsPoE(schedule="linear", head_order="prompt"),
    "mspoe-paper-layer-0": MsPoE(schedule="linear", head_order="prompt", first_layer=0),
    "mspoe-by-parts": MsPoE(schedule="by-parts", ratio_min=2.0, ratio_max=FACTOR, first_layer=0, head_order="prompt"),
}


def main() -> None:
    """Compare the methods and continue an interrupted run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--samples", type=int, default=40)
    options = parser.parse_args()
    console = Console()
    with console.status("comparing") as status:
        report = compare(
            "demo",
            target_length=2048,
            methods=METHODS,
            tasks=("needle", "passkey", "kv", "perplexity", "short"),
            kv_ids="number",
            samples=options.samples,
            loading=Loading(dtype="fp32"),
            out=options.out,
            resume=True,
            progress=lambda label, done, total: status.update(f"{100 * done // total} % {label}"),
        )
    console.print(report["comparison"]["verdict"])


if __name__ == "__main__":
    main()
