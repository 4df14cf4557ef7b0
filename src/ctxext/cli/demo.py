"""`ctxext demo`: a comparison of methods on the demo checkpoint, in about a minute."""

from pathlib import Path
from typing import Annotated

import typer

from ctxext.checkpoint.opening import open_checkpoint
from ctxext.cli.options import takes_options
from ctxext.cli.output import Output, done_line
from ctxext.converters.inspection import inspect_checkpoint
from ctxext.files.output_directory import check_name
from ctxext.recipes.methods.mspoe import MsPoE
from ctxext.recipes.methods.ntk import Ntk
from ctxext.recipes.methods.pi import PositionInterpolation
from ctxext.recipes.methods.yarn import Yarn

_TIMES = 4
_RECIPES = {
    "pi": PositionInterpolation(factor=_TIMES),
    "ntk": Ntk(factor=_TIMES),
    "yarn": Yarn(factor=_TIMES),
    "mspoe": MsPoE(schedule="linear", head_order="prompt"),
    "mspoe-by-parts": MsPoE(schedule="by-parts", ratio_min=2, ratio_max=_TIMES, first_layer=0, head_order="prompt"),
}


@takes_options(without=("verbose",))
def demo(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder for the report.")] = Path("demo-out"),
    samples: Annotated[int, typer.Option(help="Questions per depth and length.")] = 12,
    *,
    output: Output,
) -> None:
    """Extend the demo checkpoint with five recipes and compare their retrieval.

    Examples:
    ctxext demo
    """
    check_name(out)
    inspection = inspect_checkpoint(open_checkpoint("demo"))
    assert inspection.rotary is not None
    assert inspection.num_parameters is not None
    trained, heads = inspection.rotary.trained_length, inspection.attention
    output.note(
        done_line(
            "demo checkpoint",
            f"{inspection.num_parameters / 1e6:.1f} M parameters · {heads['heads']} heads, "
            f"{heads['key_heads']} KV heads · trained on {trained} tokens · rope theta {inspection.rotary.theta:g}",
        )
    )
    from ctxext.cli.compare import comparison_tables
    from ctxext.tasks.settings import even_depths

    lengths, place = (trained, _TIMES * trained), out / "report"
    output.note(f"5 depths × {samples} needles at {lengths[0]} and {lengths[1]} tokens")
    with output.progress("comparing", stopped="") as progress:
        from ctxext.compare.run import compare  # Imports torch, which takes seconds.

        report = compare(
            "demo",
            target_length=lengths[1],
            methods=_RECIPES,
            tasks=("needle",),
            lengths=lengths,
            depths=even_depths(5),
            samples=samples,
            out=place,
            overwrite=True,
            progress=progress,
        )
    shares: dict[str, dict[int, list[float]]] = {}
    for model in report["models"]:
        for cell in model["cells"]:
            shares.setdefault(model["name"], {}).setdefault(cell["length"], []).append(cell["share"])
    verdict = report["comparison"]["verdict"]
    output.result(
        {
            "samples": samples,
            "lengths": list(lengths),
            "exact_match": shares,
            "shows": verdict,
            "report": str(out),
        },
        *comparison_tables(report, output.stdout.width),
        verdict,
    )
    output.note(f"Pictures: {place / 'report.html'}")
    output.next_step("ctxext", "compare", "YOUR_MODEL", "--target-length", "32k")
