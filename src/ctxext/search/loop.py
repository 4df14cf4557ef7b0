"""Tries recipes until the time or the trials are used up."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ctxext.errors import CtxextError
from ctxext.search.eval_set import Exam
from ctxext.search.measurement import Measurement, measure
from ctxext.search.options import Options
from ctxext.search.pareto import Point, best_of, is_hopeless, points_of
from ctxext.search.space import Parameters, Space
from ctxext.search.study import Study, Tried
from ctxext.search.trial_model import Workbench

_FAR = 10.0


@dataclass(frozen=True)
class Standing:
    """How a search stands, for people who watch it.

    Attributes:
        stage: What is being done.
        stock: The plain model's answers; None before they are known.
        tried: Every recipe so far, in order.
        points: Those that were measured to the end.
        best: The best so far of those that keep the trained window.
        seconds_left: Until the time is up; infinite where only trials are counted.
        trials: How many will be tried; None where only time counts.
    """

    stage: str
    stock: Measurement | None = None
    tried: Sequence[Tried] = ()
    points: Sequence[Point] = ()
    best: Point | None = None
    seconds_left: float = math.inf
    trials: int | None = None


Watch = Callable[[Standing], None]


@dataclass(frozen=True)
class Seeker:
    """Everything that trying a recipe takes.

    Attributes:
        bench: The model.
        space: What can be tried.
        options: How long to try, and what may be lost.
        exam: What every recipe is asked.
        stock: The plain model's answers to that.
        watch: Called before each recipe.
        end: When to stop, on the monotonic clock in seconds.
    """

    bench: Workbench
    space: Space
    options: Options
    exam: Exam
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
        tried = study.tried()
        points = points_of(tried, self.stock)
        best = best_of(points, self.options.keep_short)
        left = max(0.0, self.end - time.monotonic())
        return Standing("trying recipes", self.stock, tried, points, best, left, self.options.trials)

    def _tried(self, parameters: Parameters, standing: Standing, is_start: bool) -> Any:
        """What comes of a recipe: itself, its measurement, and why there is none."""

        def stop(found: Measurement) -> bool:
            # What others are compared with and start from is asked everything, if it is anywhere near.
            if is_start:
                return found.rise(self.stock)[0] > _FAR * self.options.keep_short
            return is_hopeless(found, self.stock, standing.points, self.options.keep_short)

        try:
            recipe = self.bench.prepared(self.space.recipe(parameters))
            known = next((one for one in standing.tried if one.recipe and one.recipe.steps == recipe.steps), None)
            if known is not None:
                return recipe, known.measurement, ""
            return recipe, measure(self.bench.apply(recipe), self.exam, stop), ""
        except CtxextError as error:
            return None, None, error.message
