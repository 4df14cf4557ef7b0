"""The loss curve as a picture."""

from collections.abc import Sequence
from pathlib import Path

from ctxext.evaluate.report.colours import series_style

_SPAN = 0.05
"""The share of the steps over which a curve is smoothed."""


def draw_losses(losses: Sequence[tuple[int, float]], lengths: Sequence[int], path: Path) -> None:
    """Draw the loss of every step as a point, and a smoothed curve, in one colour for each length.

    The losses of different lengths lie at different heights, so that one curve for all would only show the mixture.

    Args:
        losses: Step, counted from 1, and loss.
        lengths: Tokens of a sequence in each step.
        path: The PNG file to make.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for number, length in enumerate(sorted(set(lengths), reverse=True)):
        chosen = [(step, loss) for step, loss in losses if lengths[step - 1] == length]
        if chosen:
            colour, dashes = series_style(number)
            steps, values = zip(*chosen, strict=True)
            axes.plot(steps, values, ".", color=colour, alpha=0.3, markersize=4)
            style = (0, dashes) if dashes else "-"
            axes.plot(steps, smoothed(steps, values), color=colour, linestyle=style, label=f"{length:,} tokens")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)


def smoothed(steps: Sequence[int], values: Sequence[float]) -> list[float]:
    """At each step the mean of the values around it, as many on either side, so that a slope stays where it is."""
    reach = max(1.0, _SPAN * (steps[-1] - steps[0]) / 2)
    means = []
    for at in steps:
        # Near an end the window is as short as the way to it.
        near = min(reach, at - steps[0], steps[-1] - at)
        window = [value for step, value in zip(steps, values, strict=True) if abs(step - at) <= near]
        means.append(sum(window) / len(window))
    return means
