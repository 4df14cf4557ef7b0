"""`ctxext demo`: the main job, on the checkpoint in the package, in about a minute."""

import shutil
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from ctxext.checkpoint.opening import open_checkpoint
from ctxext.cli.options import JsonOption, QuietOption
from ctxext.cli.output import Output
from ctxext.cli.terminal import done_line
from ctxext.converters.convert import convert
from ctxext.converters.inspection import inspect_checkpoint
from ctxext.recipes.recipe import Recipe
from ctxext.recipes.registry import method_named

_RECIPES: dict[str, list[dict[str, Any]]] = {
    "pi": [{"method": "pi", "factor": 4}],
    "ntk": [{"method": "ntk", "factor": 4}],
    "yarn": [{"method": "yarn", "factor": 4}],
    "mspoe": [{"method": "mspoe", "schedule": "linear", "head_order": "prompt"}],
    "mspoe-by-parts": [
        {
            "method": "mspoe",
            "schedule": "by-parts",
            "ratio_min": 2,
            "ratio_max": 4,
            "first_layer": 0,
            "head_order": "prompt",
        },
    ],
}
_SHOWN = {"mspoe": "mspoe, linear (paper)", "mspoe-by-parts": "mspoe, by parts 2–4"}


def demo(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Where the checkpoints and the report go.")] = Path(
        "demo-out"
    ),
    samples: Annotated[int, typer.Option(help="Questions per depth and length.")] = 12,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Extend the checkpoint in the package five ways, ask each for needles, and show who finds them where.

    Examples:

    ctxext demo
    """
    output = Output(as_json=as_json, quiet=quiet)
    source = open_checkpoint("demo")
    inspection = inspect_checkpoint(source)
    assert inspection.rotary is not None
    assert inspection.num_parameters is not None
    trained, heads = inspection.rotary.trained_length, inspection.attention
    output.note(
        done_line(
            "demo checkpoint",
            f"{inspection.num_parameters / 1e6:.1f} M parameters · {heads['heads']} heads, "
            f"{heads['key_heads']} KV heads · trained to {trained} tokens · rope theta {inspection.rotary.theta:g}",
        )
    )
    folders = _convert_all(output, out)
    lengths = (trained, 4 * trained)
    report = _ask(output, folders, out, lengths, samples)
    shares = _shares(report)
    sentence = _sentence(shares, lengths)
    output.result(
        {"samples": samples, "lengths": list(lengths), "exact_match": shares, "shows": sentence, "report": str(out)},
        _table(shares, lengths),
        sentence,
    )
    output.note(f"Pictures: {out / 'report' / 'report.html'}")
    output.next_step("ctxext", "inspect", "YOUR_MODEL")


def _convert_all(output: Output, out: Path) -> dict[str, Path]:
    """Convert the demo checkpoint by each recipe, replacing the results of an earlier demo."""
    folders: dict[str, Path] = {}
    for name, steps in _RECIPES.items():
        started = time.perf_counter()
        parsed = [method_named(step["method"])(**{k: v for k, v in step.items() if k != "method"}) for step in steps]
        done = convert("demo", out / name, Recipe(parsed), overwrite=True, check=False)
        folders[name] = done.written.folder
        carried = "carries its own code" if done.plan.recipe.needs_code else "config only"
        seconds = time.perf_counter() - started
        output.note(f"  {_shown(name):<24}→ {out / name}   {carried}, weights {done.written.how}, {seconds:.2f} s")
    return folders


def _ask(output: Output, folders: dict[str, Path], out: Path, lengths: tuple[int, ...], samples: int) -> dict[str, Any]:
    from ctxext.evaluate import Settings, evaluate

    settings = Settings(tasks=("needle",), lengths=lengths, samples=samples, allow_beyond=True)
    place = out / "report"
    shutil.rmtree(place, ignore_errors=True)
    title = f"asking {len(settings.depths)} depths × {samples} needles at {lengths[0]} and {lengths[1]} tokens"
    with output.progress(title) as progress:
        return evaluate(["demo", *map(str, folders.values())], settings, out=place, progress=progress)


def _shares(report: dict[str, Any]) -> dict[str, dict[int, list[float]]]:
    """Exact match by model, length and depth."""
    shares: dict[str, dict[int, list[float]]] = {}
    for model in report["models"]:
        name = "stock" if model["name"] == "demo" else str(model["name"])
        for cell in model["cells"]:
            shares.setdefault(name, {}).setdefault(cell["length"], []).append(cell["share"])
    return shares


def _shown(name: str) -> str:
    return _SHOWN.get(name, name if name == "stock" else f"{name} ×4")


def _table(shares: dict[str, dict[int, list[float]]], lengths: tuple[int, ...]) -> Text:
    """One line per method, one group of columns per length: exact match in percent, by depth."""
    num_depths = len(next(iter(shares.values()))[lengths[0]])
    depths = "".join(f"{100 * number // (num_depths - 1):>5}" for number in range(num_depths))
    name_width = max(len(_shown(name)) for name in shares)
    groups = "".join(f"   {f'{length} tokens':<{len(depths)}}" for length in lengths)
    text = Text(f"Exact match in percent, by how deep the needle lies\n{'':{name_width}}{groups}\n")
    text.append(f"{'method':{name_width}}" + f"   {depths}" * len(lengths) + "  %\n", style="bold")
    for name, by_length in shares.items():
        text.append(f"{_shown(name):{name_width}}")
        for length in lengths:
            text.append("   ")
            for share in by_length[length]:
                colour = "green" if share >= 0.9 else "yellow" if share >= 0.5 else "red"
                text.append(f"{100 * share:>5.0f}", style=colour)
        text.append("\n")
    return text


def _sentence(shares: dict[str, dict[int, list[float]]], lengths: tuple[int, ...]) -> str:
    """A summary of the table, computed from its figures."""

    def mean(name: str, length: int) -> float:
        return sum(shares[name][length]) / len(shares[name][length])

    short, long = lengths
    best = max((name for name in shares if name != "stock"), key=lambda name: mean(name, long))
    parts = [
        f"Stock finds {mean('stock', short):.0%} within its context length and {mean('stock', long):.0%} at {long} "
        "tokens; ",
        f"without any training {_shown(best)} finds {mean(best, long):.0%} there",
    ]
    hurt = [_shown(name) for name in shares if mean(name, short) < mean("stock", short) - 0.1]
    losing = f"{' and '.join(hurt)} {'loses' if len(hurt) == 1 else 'lose'} more than ten points"
    parts.append(f"; within the original context length {losing}." if hurt else ".")
    if mean("mspoe", short) < mean("stock", short) - 0.1:
        parts.append(
            " The paper's linear ratios slow fast frequencies too, which breaks heads that look back by exact offsets; "
            "by parts leaves those alone."
        )
    return "".join(parts)
