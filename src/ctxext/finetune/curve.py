"""The loss curve as a picture."""

from collections.abc import Sequence
from pathlib import Path


def draw_losses(losses: Sequence[tuple[int, float]], short_steps: frozenset[int], path: Path) -> None:
    """Draw the loss of every step; steps on short pieces are marked, as their loss lies elsewhere.

    Args:
        losses: Step and loss.
        short_steps: Steps that trained inside the old window.
        path: The PNG file to make.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    kinds = (("long", "#1f77b4", False), ("inside the old window", "#ff7f0e", True))
    for label, colour, is_short in kinds:
        chosen = [(step, loss) for step, loss in losses if (step in short_steps) == is_short]
        if chosen:
            steps, values = zip(*chosen, strict=True)
            axes.plot(steps, values, "." if is_short else "-", color=colour, label=f"{label} sequences")
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)
