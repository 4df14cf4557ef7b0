"""The bound at the original context length is kept for sure: by the upper end of the interval of what was measured."""

import math

import pytest

from ctxext.recipes import PositionInterpolation, Recipe
from ctxext.search import final_evaluation
from ctxext.search.measurement import Measurement
from ctxext.search.pareto import best_of, points_of
from ctxext.search.study import Trial


def measured(documents: list[float], loss: float) -> Measurement:
    return Measurement(documents, {160: 2 * [-math.log1p(-loss)]}, {160: [True, False]}, (160,), 2)


STOCK = measured([1.0, 1.0, 1.0], 0.9)
STEADY, SCATTERED = measured([1.004, 1.005, 1.006], 0.5), measured([0.99, 1.005, 1.02], 0.3)


def test_a_rise_that_only_may_be_small_does_not_count():
    rise, half = SCATTERED.rise(STOCK)
    assert rise < 0.01 < rise + half
    points = points_of([Trial(n, "", None, one, "", 1.0) for n, one in enumerate((STEADY, SCATTERED))], STOCK)
    assert points[1].sure_rise == pytest.approx(rise + half)
    assert best_of(points, 0.01).trial.number == 0


def test_nor_in_the_run_off(monkeypatch):
    """Both are finalists; the scattered one answers better and is given up for its documents."""
    recipe = Recipe([PositionInterpolation(factor=2)])
    trials = [Trial(n, "", recipe, one, "", 1.0) for n, one in enumerate((STEADY, SCATTERED))]
    asked = {final_evaluation._STOCK: STOCK, 0: STEADY, 1: SCATTERED}
    monkeypatch.setattr(final_evaluation, "_asked", lambda bench, eval_set, trials, end, has_lost: asked)
    kept = final_evaluation.run_off(None, None, points_of(trials, STOCK), 0.01, math.inf)
    assert [point.trial.number for point in kept] == [0]
