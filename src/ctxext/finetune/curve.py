"""The loss curve as a picture."""

from collections.abc import Sequence
from pathlib import Path


def draw_losses(losses: Sequence[tuple[int, float]], lengths: Sequence[int], path: Path) -> None:
    """Draw the loss of every step, in one colour for each length: their losses lie at different heights.

    Args:
        losses: Step, counted from 1, and loss.
        lengths: Tokens of a sequence in each step.
        path: The PNG file to make.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for length in sorted(set(lengths), reverse=True):
        chosen = [(step, loss) for step, loss in losses if lengths[step - 1] == length]
        if chosen:
            steps, values = zip(*chosen, strict=True)
            axes.plot(steps, values, "-" if length == max(lengths) else ".", label=f"{length:,} tokens")
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)
