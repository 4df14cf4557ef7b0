"""Tries recipes until the time or the trials are used up."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ctxext.errors import CtxextError
from ctxext.search.eval_set import EvalSet
from ctxext.search.measurement import Measurement, measure
from ctxext.search.options import SearchOptions
from ctxext.search.pareto import Point, best_of, is_hopeless, points_of
from ctxext.search.space import Parameters, Space
from ctxext.search.study import Study, Trial
from ctxext.search.trial_model import Workbench

_FAR = 10.0


@dataclass(frozen=True)
class Standing:
    """How a search stands, for people who watch it.

    Attributes:
        stage: What is being done.
        stock: The plain model's answers; None before they are known.
        trials: Every recipe so far, in order.
        points: Those that were measured to the end.
        best: The best so far of those that keep the bound at the original context length.
        seconds_left: Until the time is up; infinite where only trials are counted.
        max_trials: How many will be tried; None where only time counts.
    """

    stage: str
    stock: Measurement | None = None
    trials: Sequence[Trial] = ()
    points: Sequence[Point] = ()
    best: Point | None = None
    seconds_left: float = math.inf
    max_trials: int | None = None


Watch = Callable[[Standing], None]


@dataclass(frozen=True)
class SearchLoop:
    """Everything that trying a recipe takes.

    Attributes:
        bench: The model.
        space: What can be tried.
        options: How long to try, and what may be lost.
        eval_set: What every recipe is asked.
        stock: The plain model's answers to that.
        watch: Called before each recipe.
        end: When to stop, on the monotonic clock in seconds.
    """

    bench: Workbench
    space: Space
    options: SearchOptions
    eval_set: EvalSet
    stock: Measurement
    watch: Watch
    end: float

    def run(self, path: Path, header: dict[str, Any]) -> Standing:
        """Try recipes; those that the search starts from are tried whatever the time."""
        study = Study(path, self.space, self.options.seed, self.options.keep_short)
        study.begin(header)
        while True:
            study.rescue()
            standing = self._standing(study)
            is_due = time.monotonic() < self.end and study.is_due(self.options.trials)
            if not is_due and not study.has_waiting:
                return standing
            self.watch(standing)
            trial, parameters = study.ask()
            study.tell(trial, self.stock, *self._tried(parameters, standing, study.is_start(trial)))

    def _standing(self, study: Study) -> Standing:
        trials = study.trials()
        points = points_of(trials, self.stock)
        best = best_of(points, self.options.keep_short)
        left = max(0.0, self.end - time.monotonic())
        return Standing("trying recipes", self.stock, trials, points, best, left, self.options.trials)

    def _tried(self, parameters: Parameters, standing: Standing, is_start: bool) -> Any:
        """What comes of a recipe: itself, its measurement, and why there is none."""

        def stop(found: Measurement) -> bool:
            # What others are compared with and start from is asked everything, if it is anywhere near.
            if is_start:
                return found.rise(self.stock)[0] > _FAR * self.options.keep_short
            return is_hopeless(found, self.stock, standing.points, self.options.keep_short)

        try:
            recipe = self.bench.prepared(self.space.recipe(parameters))
            known = next((one for one in standing.trials if one.recipe and one.recipe.steps == recipe.steps), None)
            if known is not None:
                return recipe, known.measurement, ""
            return recipe, measure(self.bench.apply(recipe), self.eval_set, stop), ""
        except CtxextError as error:
            return None, None, error.message
