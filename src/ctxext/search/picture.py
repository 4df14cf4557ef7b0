"""The picture of a search: every recipe by its two losses, and the Pareto front."""

from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter

from ctxext.evaluate.report.colours import SERIES
from ctxext.evaluate.report.pictures import as_png
from ctxext.search.study import Point, pareto_front

_INK, _FAINT = "#222222", "#d5d5d5"
_MARKERS = "osDv^P*X"


def pareto_picture(points: Sequence[Point], best: Point | None, keep_short: float, title: str) -> bytes:
    """A PNG with the rise at the original context length across and the loss of the answers upwards."""
    figure = Figure(figsize=(7.2, 4.4), layout="constrained")
    axes = figure.subplots()
    groups: dict[str, list[Point]] = {}
    for point in points:
        assert point.trial.recipe is not None
        groups.setdefault(" + ".join(step.name for step in point.trial.recipe.steps), []).append(point)
    for number, (name, members) in enumerate(sorted(groups.items(), key=lambda group: (-len(group[1]), group[0]))):
        axes.scatter(
            [100 * point.rise for point in members],
            [point.loss for point in members],
            s=[46 if point.trial.published else 20 for point in members],
            color=SERIES[number % len(SERIES)],
            marker=_MARKERS[number // len(SERIES) % len(_MARKERS)],
            linewidths=0.8,
            edgecolors=[_INK if point.trial.published else "none" for point in members],
            label=name,
            zorder=3,
        )
    front = sorted(pareto_front(points), key=lambda point: point.rise)
    line = {"color": _INK, "linewidth": 1.0, "zorder": 2}
    axes.step([100 * point.rise for point in front], [point.loss for point in front], where="post", **line)
    axes.axvline(100 * keep_short, color=_INK, linewidth=0.9, linestyle=":")
    if best is not None:
        axes.scatter(
            [100 * best.rise], [best.loss], s=190, facecolors="none", edgecolors=_INK, linewidths=1.4, zorder=4
        )
    if all(point.loss > 0 for point in points):
        axes.set_yscale("log")
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.set_xlabel("rise of the loss at the original context length, in percent")
    axes.set_ylabel("loss of the answers, from 0 to 1")
    axes.set_title(title, fontsize=10, fontweight="bold")
    axes.grid(color=_FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if points:
        note = "outlined: published numbers\nring: taken\ndotted: what may be lost"
        axes.legend(
            fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5), title=note, title_fontsize=7
        )
    return as_png(figure)
