"""Every method on the demo checkpoint, at its original context length and beyond: the figures under docs/results.

python benchmarks/methods.py docs/results
"""

import argparse
import tempfile
import time
from pathlib import Path

from rich.console import Console

from ctxext.cli.eval_tables import report_tables
from ctxext.converters.convert import convert
from ctxext.evaluate import Settings, evaluate
from ctxext.evaluate.model import Loading
from ctxext.evaluate.report.findings import findings, percent, pooled
from ctxext.recipes.recipe import recipe_from_dict

LENGTHS = (512, 1024, 2048)
RECIPES = {
    "pi": {"method": "pi", "factor": 4.0},
    "ntk": {"method": "ntk", "factor": 4.0},
    "ntk-by-parts": {"method": "ntk-by-parts", "factor": 4.0},
    "yarn": {"method": "yarn", "factor": 4.0},
    "mspoe": {"method": "mspoe"},
    "mspoe-layer-0": {"method": "mspoe", "first_layer": 0},
    "mspoe-paper": {"method": "mspoe", "schedule": "linear", "head_order": "prompt", "first_layer": 2},
    "mspoe-paper-layer-0": {"method": "mspoe", "schedule": "linear", "head_order": "prompt", "first_layer": 0},
    "mspoe-by-parts": {
        "method": "mspoe", "schedule": "by-parts", "ratio_min": 2.0, "ratio_max": 4.0, "first_layer": 0,
        "head_order": "prompt",
    },
}  # fmt: skip
NOTES = """
## What this does not show

- The demo checkpoint is a toy: about a million parameters, trained for minutes on text like that of the tasks. Which
  method wins here says little about which wins on a model of billions of parameters; how to measure it is what carries
  over.
- No method was fine-tuned afterwards. PI above all is meant to be.
- `mspoe` is what `convert` makes by default (ntk, calibrated order), `mspoe-paper` the form of the paper (linear, the
  prompt orders the heads). Both leave the first two layers as they are. The demo checkpoint does its look-ups in just
  these, so that they change little here; `…-layer-0` takes every layer.
- Answers are scored as they are written: where heads choose by the prompt, the prompt runs first and the answer on its
  cache. Version 0.1.0 ran both in one forward, and printed 56 % of pass keys at 512 tokens for `mspoe-paper`.
- `mspoe` was made to use the original context length better, not to extend it, and its linear ratios are known to do
  harm where heads rely on exact offsets.
- The prose comes from a small grammar. Perplexity on it tells what a change costs, not how well a model reads.
- {samples} questions per cell: intervals (95 %, Wilson) are wide, and differences inside them mean nothing. The cells
  of one text are not independent of each other.
"""


def convert_all(place: Path) -> list[str]:
    """The demo checkpoint by each recipe."""
    for name, step in RECIPES.items():
        convert("demo", place / name, recipe_from_dict({"steps": [step]}, name), check=False)
    return ["demo", *(str(place / name) for name in RECIPES)]


def markdown(report: dict, samples: int) -> str:
    """The page that goes with the report."""
    lines = ["# Every method on the demo checkpoint", ""]
    lines += [
        "Beside this page: [relation maps](relation.md), [accelerators](gpu.md), [fine-tuning](finetune.md),",
        "[search](search.md), [tables of positions and ALiBi](beyond-rotary.md) and [a trained model](smollm2.md).",
        "",
    ]
    lines += ["Made with `python benchmarks/methods.py docs/results`. Trained to 512 tokens, factor 4, no fine-tuning;"]
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    lines += [
        f"{samples} questions per depth and length, five depths, seed {report['settings']['seed']}, float32;"
        f" {versions}.",
        "",
    ]
    lines += ["## What it shows", "", *(f"- {sentence}" for sentence in findings(report)), ""]
    for task in dict.fromkeys(cell["task"] for model in report["models"] for cell in model["cells"]):
        lines += [f"## {task}", "", f"![{task}]({task}.png)", ""]
        lines += ["| model | " + " | ".join(f"{length} tokens" for length in LENGTHS) + " |", "|---" * 4 + "|"]
        for model in report["models"]:
            shown = []
            for length in LENGTHS:
                own = [c for c in model["cells"] if c["task"] == task and c["length"] == length]
                share, low, high = pooled(own)
                shown.append(f"{percent(share)} % ({percent(low)}–{percent(high)})")
            lines.append(f"| {model['name']} | {' | '.join(shown)} |")
        lines.append("")
    lines += ["## Cost at the original context length", ""]
    lines += ["Nats per token of prose against the demo as it is, paired by document.", ""]
    lines += ["| model | more nats per token | perplexity |", "|---|---|---|"]
    for model in report["models"]:
        cost = (model["short"] or {}).get("against")
        if cost:
            interval = f"{cost['low']:+.4f} to {cost['high']:+.4f}"
            lines.append(f"| {model['name']} | {cost['loss']:+.4f} ({interval}) | × {cost['ratio']:.3f} |")
    lines += ["", "## Loss by position", "", "![loss by position](perplexity.png)", ""]
    lines += [
        "Single figures are in [report.json](report.json); [report.html](report.html) shows all of it on one page."
    ]
    return "\n".join(lines) + "\n" + NOTES.format(samples=samples)


def main() -> None:
    """Convert, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--samples", type=int, default=40)
    options = parser.parse_args()
    settings = Settings(
        tasks=("needle", "passkey", "kv", "perplexity", "short"),
        lengths=LENGTHS,
        samples=options.samples,
        kv_ids="number",
        allow_beyond=True,
    )
    started = time.perf_counter()
    console = Console()
    with tempfile.TemporaryDirectory() as place, console.status("measuring") as status:
        report = evaluate(
            convert_all(Path(place)),
            settings,
            loading=Loading(dtype="fp32"),
            out=options.out,
            resume=True,
            progress=lambda label, done, total: status.update(f"{100 * done // total} % {label}"),
        )
    (options.out / "README.md").write_text(markdown(report, options.samples), encoding="utf-8")
    for table in report_tables(report, console.width):
        console.print(table, soft_wrap=True)
    console.print("", *findings(report), f"{time.perf_counter() - started:.0f} s", sep="\n")


if __name__ == "__main__":
    main()
