"""The pictures of a report: heat maps of depth by length, and loss by position."""

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from ctxext.evaluate.report.colours import SERIES, hexadecimal, ink, shade
from ctxext.evaluate.report.findings import percent
from ctxext.evaluate.report.report import Report
from ctxext.recipes.length import format_length

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INK = {"light": "#222222", "dark": "#e4e4e4"}
_PAPER = {"light": "#ffffff", "dark": "#17191c"}
_FAINT = {"light": "#d5d5d5", "dark": "#3a3e44"}
_MAX_COLUMNS = 4
_MAX_NUMBERED = 400
_DASHES = ("-", (0, (6, 2)), (0, (2, 1.5)), (0, (6, 2, 1.5, 2)))


def heat_maps(report: Report, task: str, *, theme: str = "light", names: Sequence[str] = ()) -> Figure | None:
    """Depth by length, one map per model side by side; None where the task was not asked.

    Args:
        report: The content of report.json.
        task: Which task.
        theme: "light" or "dark".
        names: Only these models.
    """
    models = [
        model
        for model in report["models"]
        if (not names or model["name"] in names) and any(cell["task"] == task for cell in model["cells"])
    ]
    if not models:
        return None
    cells = [cell for model in models for cell in model["cells"] if cell["task"] == task]
    lengths, depths = sorted({cell["length"] for cell in cells}), sorted({cell["depth"] for cell in cells})
    rows = -(-len(models) // _MAX_COLUMNS)
    columns = -(-len(models) // rows)
    width, height = max(2.4, 0.62 * len(lengths) + 1.0), max(2.0, 0.3 * len(depths) + 1.1)
    with _themed(theme):
        figure = Figure(figsize=(columns * width + 0.6, rows * height + 0.5), layout="constrained")
        grid = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
        for number, axes in enumerate(grid.flat):
            if number < len(models):
                _heat_map(axes, models[number], task, lengths, depths)
                axes.tick_params(labelbottom=number + columns >= len(models))
            else:
                axes.set_visible(False)
        has_line = any(
            model["trained_length"] and lengths[0] <= model["trained_length"] < lengths[-1] for model in models
        )
        note = "\n(right of the line: longer than trained)" if has_line else ""
        figure.supxlabel(f"prompt length in tokens{note}", fontsize=9)
        figure.supylabel("depth of the needle", fontsize=9)
        figure.suptitle(f"{task}: % of questions answered", fontsize=11, fontweight="bold")
        return figure


def _heat_map(axes: "Axes", model: dict[str, Any], task: str, lengths: Sequence[int], depths: Sequence[float]) -> None:
    found = {(c["length"], c["depth"]): c["share"] for c in model["cells"] if c["task"] == task}
    values = [[found.get((length, depth), float("nan")) for length in lengths] for depth in depths]
    colours = LinearSegmentedColormap.from_list("share", [hexadecimal(shade(i / 20)) for i in range(21)])
    axes.imshow(values, aspect="auto", cmap=colours, vmin=0, vmax=1)
    axes.set_title(model["name"], fontsize=9)
    axes.set_xticks(range(len(lengths)), [format_length(length) for length in lengths], fontsize=8)
    axes.set_yticks(range(len(depths)), [f"{round(100 * depth)} %" for depth in depths], fontsize=8)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    if len(lengths) * len(depths) > _MAX_NUMBERED:
        return
    for (length, depth), share in found.items():
        place = lengths.index(length), depths.index(depth)
        axes.text(*place, percent(share), ha="center", va="center", fontsize=7.5, color=ink(shade(share)))
    trained = model["trained_length"]
    beyond = [i for i, length in enumerate(lengths) if trained and length > trained]
    if beyond and beyond[0] > 0:
        axes.axvline(beyond[0] - 0.5, color=axes.xaxis.label.get_color(), linewidth=1.4)


def loss_curves(report: Report, *, theme: str = "light") -> Figure | None:
    """Loss by position for every model, with the original context lengths marked; None where it was not measured."""
    models = [model for model in report["models"] if model["perplexity"]]
    if not models:
        return None
    with _themed(theme):
        figure = Figure(figsize=(7.2, 4.0), layout="constrained")
        axes = figure.subplots()
        for number, model in enumerate(models):
            points = model["perplexity"]["curve"]
            axes.plot(
                [(point["start"] + point["end"]) / 2 for point in points],
                [point["loss"] for point in points],
                color=SERIES[number % len(SERIES)],
                linestyle=_DASHES[number // 2 % len(_DASHES)],
                linewidth=1.7,
                label=model["name"],
            )
        for trained in sorted({model["trained_length"] for model in models if model["trained_length"]}):
            axes.axvline(trained, color=_INK[theme], linewidth=0.9, linestyle=":")
            axes.annotate(
                f"trained to {format_length(trained)}",
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
        axes.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
        return figure


@contextmanager
def _themed(theme: str) -> Iterator[None]:
    colours = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "axes.titlecolor")
    settings: dict[str, Any] = dict.fromkeys(colours, _INK[theme])
    settings |= {"figure.facecolor": _PAPER[theme], "axes.facecolor": _PAPER[theme], "font.size": 9.0}
    settings |= {"svg.hashsalt": "ctxext", "font.family": "DejaVu Sans"}
    with mpl.rc_context(settings):
        yield


def as_png(figure: Figure) -> bytes:
    """A figure as the bytes of a PNG file, the same bytes for the same figure."""
    FigureCanvasAgg(figure)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=160, metadata={"Software": None})
    return buffer.getvalue()
