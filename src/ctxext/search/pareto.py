"""The Pareto front of the tried recipes by their two aims, and the best one."""

from collections.abc import Sequence
from dataclasses import dataclass

from ctxext.search.measurement import Measurement
from ctxext.search.study import Trial


@dataclass(frozen=True)
class Point:
    """A recipe that was measured to the end.

    Attributes:
        trial: The recipe.
        loss: Mean bounded loss of the answers, from 0 to 1, over all lengths.
        rise: By which share the loss at the original context length rises.
        sure_rise: The upper end of the 95 % interval of that.
    """

    trial: Trial
    loss: float
    rise: float
    sure_rise: float

    def dominates(self, loss: float, rise: float) -> bool:
        """Whether it is better than a recipe with these values in one aim and no worse in the other."""
        return self.loss <= loss and self.rise <= rise and (self.loss, self.rise) != (loss, rise)


def points_of(trials: Sequence[Trial], stock: Measurement) -> list[Point]:
    """The recipes that were measured to the end, in order."""
    points = []
    for one in trials:
        if one.measurement is not None and one.measurement.is_whole:
            rise, half = one.measurement.rise(stock)
            points.append(Point(one, one.measurement.loss, rise, rise + half))
    return points


def pareto_front(points: Sequence[Point]) -> list[Point]:
    """The points that no other dominates, lowest loss first."""
    front = [point for point in points if not any(other.dominates(point.loss, point.rise) for other in points)]
    return sorted(front, key=lambda point: (point.loss, point.rise))


def best_of(points: Sequence[Point], keep_short: float) -> Point | None:
    """The point with the lowest loss among those that keep the bound for sure; the earlier of two equal ones."""
    kept = [point for point in points if point.sure_rise <= keep_short]
    return min(kept, key=lambda point: (point.loss, point.trial.number), default=None)


def is_hopeless(measurement: Measurement, stock: Measurement, points: Sequence[Point], keep_short: float) -> bool:
    """Whether a recipe that is being measured is not worth the rest of its eval set.

    It loses more at the original context length than it may, or what it has lost so far already makes sure that another
    one dominates it. Recipes that lose less than half of what they may count as alike in that.
    """
    rise = measurement.rise(stock)[0]
    alike = max(rise, keep_short / 2)
    return rise > keep_short or any(point.dominates(measurement.least_loss, alike) for point in points)
