"""`ctxext compare`: compare the published methods on a model, with their costs."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import typer
from rich.console import RenderableType
from rich.text import Text

from ctxext.cli.eval import ReportPlace, list_open_thoughts, warn_of_thoughts
from ctxext.cli.eval_tables import heat_maps, results_table
from ctxext.cli.options import SourceArgument, takes_options
from ctxext.cli.output import Output
from ctxext.cli.processes import Launch, resumable
from ctxext.compare.candidates import CompareOptions
from ctxext.compare.page import PAGE
from ctxext.compare.tables import tabulate_costs, tabulate_losses
from ctxext.converters.engine_support import EXACT, PARTLY
from ctxext.models.loading import Loading

if TYPE_CHECKING:
    from ctxext.report.report import Report

_MARKS = {EXACT: "", PARTLY: " ~"}


@takes_options(
    order=("source", "target_length", "methods", "minutes", ...),
    without=("allow_beyond", "engine", "engine_arguments"),
)
def compare(
    source: SourceArgument,
    *,
    options: CompareOptions,
    loading: Loading,
    place: ReportPlace,
    launch: Launch,
    output: Output,
) -> None:
    """Try every suitable method on the model in memory and compare them.

    Examples:
    ctxext compare demo --target-length 2k

    ctxext compare my-model --target-length 32k --methods yarn,self-extend,mine.yaml --minutes 30

    ctxext compare my-model --target-length 32k --task needle,kv --samples 50 --out report --resume
    """
    out = place.folder()
    launch.start(out)
    with resumable(out, output), output.progress("comparing") as progress:
        from ctxext.compare.run import compare as run  # Imports torch, which takes seconds.

        report = run(
            source,
            options=options,
            loading=loading,
            out=out,
            resume=place.resume,
            overwrite=place.overwrite,
            progress=progress,
            notify=output.note,
        )
    if not report:
        return
    content = report["comparison"]
    if report.get("skipped_lines"):
        output.warning(f"Skipped {report['skipped_lines']} lines of {out} that are incomplete or from another run.")
    warn_of_thoughts(list_open_thoughts(report["models"][:1]), output)
    output.result(report, *comparison_tables(report, output.stdout.width), Text(), content["verdict"])
    output.note(Text(f"Report: {out / 'report.html'}; as Markdown: {out / PAGE}"))
    taken = next((row for row in content["models"] if row["name"] == content["taken"]), None)
    if taken and taken["convert"]:
        of = ("--revision", loading.revision) if loading.revision else ()
        output.next_step("ctxext", "convert", source, *taken["convert"], *of, why="Convert with it")
    if not content["is_measured"]:
        raise typer.Exit(1)


def comparison_tables(report: "Report", width: int) -> Iterator[RenderableType]:
    """Yield the scores by length and depth, then the costs, the engines and the methods that do not apply."""
    yield from heat_maps(report, width)
    yield Text()
    rows = report["comparison"]["models"]
    columns = ("method", "found, points", "loss beyond", "cost inside", "time", "memory")
    measured = [
        row for row in rows if not row["refused"] and (row.get("against", row) or row["beyond"] or row["inside"])
    ]
    costs = tabulate_costs(measured, _format_half)
    yield results_table(costs.select(columns), no_wrap=True, strong=report["comparison"]["taken"])
    if (losses := tabulate_losses(rows, _format_half)).rows:
        yield Text()
        yield results_table(losses, no_wrap=True)
    methods: dict[str, list[str]] = {}
    for row in rows:
        served = [entry for entry in row.get("serving") or () if entry["status"] in _MARKS]
        if engines := ", ".join(entry["engine"] + _MARKS[entry["status"]] for entry in served):
            methods.setdefault(engines, []).append(row["name"])
    for engines, names in methods.items():
        yield Text(f"supported by {engines}: {', '.join(names)}", style="dim")
    for row in rows:
        if row["refused"]:
            yield Text(f"{row['name']} does not apply: {row['refused']}", style="dim")


def _format_half(difference: Mapping[str, Any] | None, decimals: int = 3, times: int = 1) -> str:
    """Format a difference with the larger half of its confidence interval."""
    if not difference:
        return "–"
    middle, low, high = (difference[name] for name in ("difference", "low", "high"))
    text = f"{times * middle:+z.{decimals}f}"
    if high is None:
        return text
    half = max(high - middle, middle - low)
    return f"{text} ± {times * half:.{decimals}f}"
