"""Try recipes until the time or the number of trials is used up."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ctxext.errors import CtxextError
from ctxext.evaluate.workbench import Workbench
from ctxext.recipes.recipe import Recipe
from ctxext.search.final_evaluation import seconds_of_end
from ctxext.search.measurement import EvalSet, Measurement, measure
from ctxext.search.options import SearchOptions
from ctxext.search.space import Parameters, Space
from ctxext.search.storage import StudyPlace
from ctxext.search.study import Point, Study, Trial, best_of, is_hopeless, points_of

_FAR = 10.0
MOST_FOR_CHECKS = 0.4
"""The largest share of the time reserved for the last checks; they use fewer prompts if that is too little."""
_SPARE = 1.2
WRITING = 3.0
"""Seconds reserved for writing files and drawing pictures."""


@dataclass(frozen=True)
class Standing:
    """The state of a search, for display.

    Attributes:
        stage: The current stage.
        stock: The plain model's answers; None before they are known.
        trials: Every recipe so far, in order.
        points: Those that were measured to the end.
        best: The best so far of those that keep the bound at the original context length.
        end: The deadline on the monotonic clock in seconds; infinite if only trials are limited.
        max_trials: The limit of trials; None if only time is limited.
    """

    stage: str
    stock: Measurement | None = None
    trials: Sequence[Trial] = ()
    points: Sequence[Point] = ()
    best: Point | None = None
    end: float = math.inf
    max_trials: int | None = None


Watch = Callable[[Standing], None]


class TimeIsUp(Exception):
    """The time is up before a recipe is measured to the end."""


@dataclass(frozen=True)
class SearchLoop:
    """Tries recipes on one model, since `started` on the monotonic clock in seconds.

    `stock` are the plain model's answers to the eval set of every trial, and `watch` is called before each recipe.
    """

    bench: Workbench
    space: Space
    options: SearchOptions
    eval_set: EvalSet
    stock: Measurement
    stock_seconds: float
    watch: Watch
    started: float

    @property
    def end(self) -> float:
        """When the whole run must be over, on the monotonic clock in seconds."""
        return self.started + self.options.seconds

    def run(self, place: StudyPlace, header: dict[str, Any]) -> Standing:
        """Try recipes while enough time is left for the last checks of the best."""
        study = Study(place, self.space, self.options.seed, self.options.keep_short)
        study.begin(header)
        while True:
            study.rescue()
            trials = study.trials()
            points = points_of(trials, self.stock)
            best, most = best_of(points, self.options.keep_short), self.options.trials
            standing = Standing("trying recipes", self.stock, trials, points, best, self.end, most)
            stop_at = self.end - self._reserve(standing.points)
            is_due = study.is_due(self.options.trials) or study.has_waiting
            if not is_due or time.monotonic() > stop_at:
                return standing
            self.watch(standing)
            trial, parameters = study.ask()

            def look(trial: Any = trial, stop_at: float = stop_at) -> None:
                study.sign(trial)
                if time.monotonic() > stop_at:
                    raise TimeIsUp

            try:
                study.tell(trial, self.stock, *self._tried(parameters, standing, study.is_start(trial), look))
            except TimeIsUp:
                study.put_back(trial)
                return standing

    def _reserve(self, points: Sequence[Point]) -> float:
        """The seconds to reserve for the last checks: estimated from what was measured, up to a share."""
        if math.isinf(self.end):
            return 0.0
        most = MOST_FOR_CHECKS * self.options.seconds
        return min(most, _SPARE * seconds_of_end(points, self.stock_seconds, self.options) + WRITING)

    def _tried(
        self, parameters: Parameters, standing: Standing, is_start: bool, look: Callable[[], None]
    ) -> tuple[Recipe | None, Measurement | None, str]:
        """A recipe's result: the recipe, its measurement, and the reason if there is none."""

        def stop(measurement: Measurement) -> bool:
            look()
            if is_start:
                # Recipes that others are compared with are measured to the end, if near and not dominated.
                rise = measurement.rise(self.stock)[0]
                return rise > _FAR * self.options.keep_short or any(
                    point.dominates(measurement.least_loss, rise) for point in standing.points
                )
            return is_hopeless(measurement, self.stock, standing.points, self.options.keep_short)

        try:
            recipe = self.bench.prepared(self.space.recipe(parameters))
            known = next((one for one in standing.trials if one.recipe and one.recipe.steps == recipe.steps), None)
            if known is not None:
                return recipe, known.measurement, ""
            return recipe, measure(self.bench.apply(recipe), self.eval_set, stop), ""
        except CtxextError as error:
            return None, None, error.message
