"""All pictures: scores by depth and length, loss by position, loss of a training, and the recipes of a search."""

import io
import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import matplotlib as mpl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from ctxext.files.length import format_length
from ctxext.report.colours import SERIES, hexadecimal, ink, series_style, shade
from ctxext.report.findings import format_percent
from ctxext.report.report import HeatMap, Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INK = {"light": "#222222", "dark": "#e4e4e4"}
_PAPER = {"light": "#ffffff", "dark": "#17191c"}
_FAINT = {"light": "#d5d5d5", "dark": "#3a3e44"}
_MAX_COLUMNS = 4
_CHARACTER = 0.08
"""Width of a character of a name, in inches."""
_LEGEND_LINE = 0.17
"""Height of a name in a legend, in inches."""
_MAX_NUMBERED = 400
_SMOOTHED = (0.25, 0.5, 0.25)
_SPAN = 0.05
"""Share of the steps of a training in the smoothing window of its curve."""
_MARKERS = "osDv^P*X"


def draw_heat_maps(heat_map: HeatMap) -> Figure:
    """Draw the scores of a task by depth and length, one map per model, side by side."""
    models, lengths, depths = heat_map.models, heat_map.lengths, heat_map.depths
    rows = -(-len(models) // _MAX_COLUMNS)
    columns = -(-len(models) // rows)
    width, height = max(2.4, 0.62 * len(lengths) + 1.0), max(2.0, 0.3 * len(depths) + 1.1)
    with _use_theme("light"):
        figure = Figure(figsize=(columns * width + 0.6, rows * height + 0.5), layout="constrained")
        grid = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
        for number, axes in enumerate(grid.flat):
            if number < len(models):
                _draw_heat_map(axes, heat_map, models[number])
                axes.set_title(textwrap.fill(models[number]["name"], int(width / _CHARACTER)), fontsize=9)
                axes.tick_params(labelbottom=number + columns >= len(models))
            else:
                axes.set_visible(False)
        has_line = any(
            model["trained_length"] and lengths[0] <= model["trained_length"] < lengths[-1] for model in models
        )
        note = "\n(right of the line: beyond the original context length)" if has_line else ""
        figure.supxlabel(f"prompt length in tokens{note}", fontsize=9)
        figure.supylabel("depth of the needle", fontsize=9)
        figure.suptitle(f"{heat_map.task}: % of correct answers", fontsize=11, fontweight="bold")
        return figure


def _draw_heat_map(axes: "Axes", heat_map: HeatMap, model: Mapping[str, Any]) -> None:
    lengths, depths = heat_map.lengths, heat_map.depths
    columns = [[cell["share"] if cell else math.nan for cell in heat_map.row(model, length)] for length in lengths]
    colours = LinearSegmentedColormap.from_list("share", [hexadecimal(shade(i / 20)) for i in range(21)])
    axes.imshow(list(zip(*columns, strict=True)), aspect="auto", cmap=colours, vmin=0, vmax=1)
    axes.set_xticks(range(len(lengths)), [format_length(length) for length in lengths], fontsize=8)
    axes.set_yticks(
        range(len(depths)), ["any" if depth is None else f"{round(100 * depth)} %" for depth in depths], fontsize=8
    )
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    if len(lengths) * len(depths) > _MAX_NUMBERED:
        return
    for x, column in enumerate(columns):
        for y, share in enumerate(column):
            if not math.isnan(share):
                colour = ink(shade(share))
                axes.text(x, y, format_percent(share), ha="center", va="center", fontsize=7.5, color=colour)
    trained = model["trained_length"]
    beyond = [i for i, length in enumerate(lengths) if trained and length > trained]
    if beyond and beyond[0] > 0:
        axes.axvline(beyond[0] - 0.5, color=axes.xaxis.label.get_color(), linewidth=1.4)


def draw_losses(report: Report, *, theme: str = "light", has_legend: bool = True, width: float = 7.2) -> Figure | None:
    """Draw the loss by position of every model, and mark original context lengths; return None if unmeasured.

    The width is in inches. A long legend makes the figure higher.
    """
    models = [model for model in report["models"] if model["perplexity"]]
    if not models:
        return None
    with _use_theme(theme):
        height = max(4.0, 0.8 + _LEGEND_LINE * len(models)) if has_legend else min(4.0, 0.9 * width)
        figure = Figure(figsize=(width, height), layout="constrained")
        axes = figure.subplots()
        curves = []
        for number, model in enumerate(models):
            points = model["perplexity"]["curve"]
            places = [(point["start"] + point["end"]) / 2 for point in points]
            losses = [point["loss"] for point in points]
            colour, dashes = series_style(number)
            axes.plot(places, losses, ".", color=colour, alpha=0.35, markersize=4)
            curves += axes.plot(
                places,
                smooth_losses(losses),
                color=colour,
                linestyle=(0, dashes) if dashes else "-",
                linewidth=1.7,
                label=model["name"],
            )
        longest = max(model["perplexity"]["length"] for model in models)
        marked = {model["trained_length"] for model in models if (model["trained_length"] or longest) < longest}
        for number, trained in enumerate(sorted(marked)):
            is_left = trained <= longest / 2
            axes.axvline(trained, color=_INK[theme], linewidth=0.9, linestyle=":")
            axes.annotate(
                f"original length {format_length(trained)}",
                (trained, 1.0),
                xycoords=("data", "axes fraction"),
                xytext=(4 if is_left else -4, -11 * (1 + number)),
                textcoords="offset points",
                ha="left" if is_left else "right",
                fontsize=8,
            )
        ticks = range(0, longest + 1, max(1, longest // 4))
        axes.set_xlim(0, longest)
        axes.set_xticks(ticks, [format_length(tick) if tick else "0" for tick in ticks])
        axes.set_xlabel("position in tokens")
        axes.set_ylabel("loss in nats per token")
        axes.set_title("Loss by position", fontsize=11, fontweight="bold")
        axes.grid(color=_FAINT[theme], linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        if has_legend:
            names = [model["name"] for model in models]
            axes.legend(curves, names, fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
        return figure


def smooth_losses(values: Sequence[float]) -> list[float]:
    """Average each value with its neighbours, weighted 1 : 2 : 1; the first and last value stay the same."""
    inner = [
        sum(w * v for w, v in zip(_SMOOTHED, values[at - 1 : at + 2], strict=True)) for at in range(1, len(values) - 1)
    ]
    return [*values[:1], *inner, *values[-1:]] if len(values) > 1 else list(values)


def draw_training(losses: Sequence[tuple[int, float]], lengths: Sequence[int]) -> Figure:
    """Draw the loss of every training step as a point, and a smoothed curve, in one colour per length.

    Losses at different lengths have different levels, so a single curve would mix them.
    """
    figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")
    axes = figure.subplots()
    for number, length in enumerate(sorted(set(lengths), reverse=True)):
        chosen = [(step, loss) for step, loss in losses if lengths[step - 1] == length]
        if chosen:
            colour, dashes = series_style(number)
            steps, values = zip(*chosen, strict=True)
            axes.plot(steps, values, ".", color=colour, alpha=0.3, markersize=4)
            style = (0, dashes) if dashes else "-"
            axes.plot(steps, smooth_training(steps, values), color=colour, linestyle=style, label=f"{length:,} tokens")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def smooth_training(steps: Sequence[int], values: Sequence[float]) -> list[float]:
    """Return the mean of the values around each step; the window is symmetric, so that a slope is not shifted."""
    width = max(1.0, _SPAN * (steps[-1] - steps[0]) / 2)
    means = []
    for at in steps:
        # Near an end the window shrinks to the distance from it.
        near = min(width, at - steps[0], steps[-1] - at)
        window = [value for step, value in zip(steps, values, strict=True) if abs(step - at) <= near]
        means.append(sum(window) / len(window))
    return means


class TradeOff(NamedTuple):
    """A recipe of a search: its methods, its losses, and whether its parameters are published."""

    methods: str
    rise: float
    loss: float
    is_published: bool


def draw_pareto_front(
    points: Sequence[TradeOff], front: Sequence[TradeOff], best: TradeOff | None, keep_short: float, title: str
) -> Figure:
    """Draw the loss of the answers over the rise at the original context length, and the Pareto front."""
    strong, faint = _INK["light"], _FAINT["light"]
    figure = Figure(figsize=(7.2, 4.4), layout="constrained")
    axes = figure.subplots()
    groups: dict[str, list[TradeOff]] = {}
    for point in points:
        groups.setdefault(point.methods, []).append(point)
    for number, (methods, members) in enumerate(sorted(groups.items(), key=lambda group: (-len(group[1]), group[0]))):
        axes.scatter(
            [100 * point.rise for point in members],
            [point.loss for point in members],
            s=[46 if point.is_published else 20 for point in members],
            color=SERIES[number % len(SERIES)],
            marker=_MARKERS[number // len(SERIES) % len(_MARKERS)],
            linewidths=0.8,
            edgecolors=[strong if point.is_published else "none" for point in members],
            label=methods,
            zorder=3,
        )
    steps = sorted(front, key=lambda point: point.rise)
    line = {"color": strong, "linewidth": 1.0, "zorder": 2}
    axes.step([100 * point.rise for point in steps], [point.loss for point in steps], where="post", **line)
    axes.axvline(100 * keep_short, color=strong, linewidth=0.9, linestyle=":")
    if best is not None:
        axes.scatter(
            [100 * best.rise], [best.loss], s=190, facecolors="none", edgecolors=strong, linewidths=1.4, zorder=4
        )
    if all(point.loss > 0 for point in points):
        axes.set_yscale("log")
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.set_xlabel("rise of the loss at the original context length (%)")
    axes.set_ylabel("loss of the answers (0 to 1)")
    axes.set_title(title, fontsize=10, fontweight="bold")
    axes.grid(color=faint, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if points:
        note = "outlined: published parameters\nring: selected\ndotted: maximum rise"
        axes.legend(
            fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5), title=note, title_fontsize=7
        )
    return figure


@contextmanager
def _use_theme(theme: str) -> Iterator[None]:
    colours = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "axes.titlecolor")
    settings: dict[str, Any] = dict.fromkeys(colours, _INK[theme])
    settings |= {"figure.facecolor": _PAPER[theme], "axes.facecolor": _PAPER[theme], "font.size": 9.0}
    settings |= {"svg.hashsalt": "ctxext", "font.family": "DejaVu Sans"}
    settings |= {"text.parse_math": False}  # A name with two "$" is not a formula.
    with mpl.rc_context(settings):
        yield


def as_png(figure: Figure, *, dpi: int = 160) -> bytes:
    """Return a figure as a PNG file, with the same bytes for the same figure."""
    FigureCanvasAgg(figure)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi, metadata={"Software": None})
    return buffer.getvalue()
