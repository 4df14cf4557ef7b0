"""The progress of a search: a table of the best recipes on a terminal, occasional lines in a log."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ctxext.cli.output import Output

if TYPE_CHECKING:
    from ctxext.search.loop import Standing
    from ctxext.search.measurement import Measurement
    from ctxext.search.pareto import Point

_SHOWN = 5
_QUIET_SECONDS = 60.0


@contextmanager
def watching(output: Output) -> "Iterator[Callable[[Standing], None]]":
    """The callback that shows the progress of a search."""
    if output.quiet:
        yield lambda standing: None
    elif output.stderr.is_terminal:
        shown: list[Standing] = []
        # Drawn again every second, so that the time goes on while a recipe is asked.
        latest = lambda: _live(shown[-1]) if shown else ""  # noqa: E731
        with Live(console=output.stderr, transient=True, refresh_per_second=1, get_renderable=latest) as live:

            def show(standing: "Standing") -> None:
                shown[:] = [standing]
                live.refresh()

            yield show
    else:
        yield _Log(output).show


class _Log:
    """Plain lines: each stage, each new best, and at least one a minute."""

    def __init__(self, output: Output) -> None:
        self.output, self.stage, self.best = output, "", -1
        self.shown_at = time.monotonic()

    def show(self, standing: "Standing") -> None:
        best = standing.best.trial.number if standing.best else -1
        is_late = time.monotonic() - self.shown_at > _QUIET_SECONDS
        # The part after a colon changes all the time.
        stage = standing.stage.split(":")[0]
        if stage == self.stage and best == self.best and not is_late:
            return
        self.shown_at = time.monotonic()
        self.stage, self.best = stage, best
        self.output.note(Text(state_line(standing) + (f"; best {point_line(standing.best)}" if standing.best else "")))


def state_line(standing: "Standing") -> str:
    """The stage, the number of recipes tried, and the time left."""
    parts = [standing.stage]
    if standing.trials:
        whole = f" of {standing.max_trials}" if standing.max_trials else ""
        stopped = len(standing.trials) - len(standing.points)
        parts.append(f"{len(standing.trials)}{whole} recipes, {stopped} stopped early")
    if math.isfinite(standing.end):
        minutes, seconds = divmod(round(max(0.0, standing.end - time.monotonic())), 60)
        parts.append(f"{minutes}:{seconds:02d} left")
    return " · ".join(parts)


def point_line(point: "Point") -> str:
    """A recipe with its two losses."""
    return f"{point.trial.name} (answers {point.loss:.4f}, original context length {100 * point.rise:+z.2f} %)"


def _live(standing: "Standing") -> RenderableType:
    shown = sorted(standing.points, key=lambda point: (point is not standing.best, point.loss))[:_SHOWN]
    return Group(Text(state_line(standing)), points_table(shown, standing.stock)) if shown else state_line(standing)


def points_table(points: "list[Point]", stock: "Measurement | None") -> Table:
    """A table of recipes with their two losses."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("recipe", overflow="fold")
    lengths = points[0].trial.measurement.lengths if points and points[0].trial.measurement else ()
    for name in ("loss of answers", "original context length", *(f"found at {length}" for length in lengths)):
        table.add_column(name, justify="right")
    for point in points:
        measurement = point.trial.measurement
        assert measurement is not None
        name = point.trial.name + (" (published)" if point.trial.published else "")
        shares = [f"{100 * measurement.exact(length):.0f} %" for length in lengths]
        table.add_row(name, f"{point.loss:.4f}", f"{100 * point.rise:+z.2f} %", *shares)
    if stock is not None and points:
        shares = [f"{100 * stock.exact(length):.0f} %" for length in lengths]
        table.add_row("as it is", f"{stock.loss:.4f}", "", *shares, style="dim")
    return table
