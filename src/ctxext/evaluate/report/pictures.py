"""The pictures of a report: heat maps of depth by length, and loss by position."""

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from ctxext.evaluate.report.colours import hexadecimal, ink, series_style, shade
from ctxext.evaluate.report.findings import format_percent
from ctxext.evaluate.report.report import HeatMap, Report
from ctxext.files.length import format_length

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INK = {"light": "#222222", "dark": "#e4e4e4"}
_PAPER = {"light": "#ffffff", "dark": "#17191c"}
_FAINT = {"light": "#d5d5d5", "dark": "#3a3e44"}
_MAX_COLUMNS = 4
_MAX_NUMBERED = 400
_SMOOTHED = (0.25, 0.5, 0.25)


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
    axes.set_title(model["name"], fontsize=9)
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


def draw_losses(report: Report, *, theme: str = "light", has_legend: bool = True) -> Figure | None:
    """Draw the loss by position of every model, and mark original context lengths; return None if unmeasured."""
    models = [model for model in report["models"] if model["perplexity"]]
    if not models:
        return None
    with _use_theme(theme):
        figure = Figure(figsize=(7.2, 4.0), layout="constrained")
        axes = figure.subplots()
        for number, model in enumerate(models):
            points = model["perplexity"]["curve"]
            places = [(point["start"] + point["end"]) / 2 for point in points]
            losses = [point["loss"] for point in points]
            colour, dashes = series_style(number)
            axes.plot(places, losses, ".", color=colour, alpha=0.35, markersize=4)
            axes.plot(
                places,
                smooth_losses(losses),
                color=colour,
                linestyle=(0, dashes) if dashes else "-",
                linewidth=1.7,
                label=model["name"],
            )
        for trained in sorted({model["trained_length"] for model in models if model["trained_length"]}):
            axes.axvline(trained, color=_INK[theme], linewidth=0.9, linestyle=":")
            axes.annotate(
                f"original length {format_length(trained)}",
                (trained, 1.0),
                xycoords=("data", "axes fraction"),
                xytext=(4, -11),
                textcoords="offset points",
                fontsize=8,
            )
        longest = max(model["perplexity"]["length"] for model in models)
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
            axes.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
        return figure


def smooth_losses(values: Sequence[float]) -> list[float]:
    """Average each value with its neighbours, weighted 1 : 2 : 1; the first and last value stay the same."""
    inner = [
        sum(w * v for w, v in zip(_SMOOTHED, values[at - 1 : at + 2], strict=True)) for at in range(1, len(values) - 1)
    ]
    return [*values[:1], *inner, *values[-1:]] if len(values) > 1 else list(values)


@contextmanager
def _use_theme(theme: str) -> Iterator[None]:
    colours = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "axes.titlecolor")
    settings: dict[str, Any] = dict.fromkeys(colours, _INK[theme])
    settings |= {"figure.facecolor": _PAPER[theme], "axes.facecolor": _PAPER[theme], "font.size": 9.0}
    settings |= {"svg.hashsalt": "ctxext", "font.family": "DejaVu Sans"}
    with mpl.rc_context(settings):
        yield


def as_png(figure: Figure) -> bytes:
    """Return a figure as a PNG file, with the same bytes for the same figure."""
    FigureCanvasAgg(figure)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=160, metadata={"Software": None})
    return buffer.getvalue()
