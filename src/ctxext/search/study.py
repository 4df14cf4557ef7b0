"""The study: recipes tried, their results, and the next one. Several processes may share it.

The sampler draws by optuna and by mutation in turn, with draws that do not depend on interruptions of the search.
"""

import contextlib
import functools
import math
import os
import random
import socket
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeVar

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.exceptions import ExperimentalWarning
from optuna.samplers import TPESampler
from optuna.trial import FrozenTrial, TrialState

from ctxext.errors import CtxextError
from ctxext.files.content import keys_that_differ
from ctxext.files.output_directory import is_running
from ctxext.recipes.recipe import Recipe, recipe_from_dict
from ctxext.search.measurement import Measurement, measurement_from
from ctxext.search.space import Parameters, Space
from ctxext.search.storage import StudyPlace

_RANDOM_AT_FIRST = 10
_NUM_PARENTS = 6
_ALIKE = 2
_CHANCE = 0.15
"""The probability that a mutation draws a categorical value again."""
_SPREAD = 0.15
"""The standard deviation of a mutation, as a share of the number's range."""


class SteadySampler(TPESampler):
    """Draws every second recipe by a multi-objective TPE sampler (Ozaki et al. 2022), the others by mutation.

    A mutation changes one of the best recipes a little, as in LongRoPE's evolution (Ding et al. 2024, section 3.2):
    models of the whole space need more trials than most searches have. Everything is seeded by the search's seed and
    the trial's number, so that a trial which a kill cut short is drawn again as it was, and those after it as if
    nothing had happened.

    Of all trials, `num_known` are given and not drawn.
    """

    def __init__(self, seed: int, num_known: int) -> None:
        self.seed, self.num_known = seed, num_known
        self._begin(0)

    def _begin(self, number: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            super().__init__(
                n_startup_trials=self.num_known + _RANDOM_AT_FIRST,
                multivariate=True,
                group=True,
                constant_liar=True,
                seed=self._random(number).getrandbits(32),
            )

    def _random(self, number: int) -> random.Random:
        return random.Random(f"{self.seed} {number}")

    def before_trial(self, study: optuna.Study, trial: FrozenTrial) -> None:
        """Seed again."""
        self._begin(trial.number)

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """The parameters that are drawn together."""
        parent = self._parent(study, trial.number)
        return parent.distributions if parent else super().infer_relative_search_space(study, trial)

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Draw them."""
        parent = self._parent(study, trial.number)
        if parent is None:
            return super().sample_relative(study, trial, search_space)
        rng = self._random(trial.number)
        return {name: _mutated(rng, parent.params[name], space) for name, space in search_space.items()}

    def _parent(self, study: optuna.Study, number: int) -> FrozenTrial | None:
        """The recipe to mutate: one of the best that keep the bound, or nearly do."""
        if number < self.num_known or number % 2:
            return None
        finished = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        near = [trial for trial in finished if trial.user_attrs["is_near"] and trial.number < number]
        best: list[FrozenTrial] = []
        for trial in sorted(near, key=lambda trial: (trial.values[0], trial.number)):
            # A few of each kind, so that the first good kind does not crowd out a better one.
            if sum(_kind(trial) == _kind(other) for other in best) < _ALIKE and len(best) < _NUM_PARENTS:
                best.append(trial)
        return self._random(number).choice(best) if best else None


def _kind(trial: FrozenTrial) -> set[tuple[str, str]]:
    """The categorical values chosen, methods among them."""
    return {(name, value) for name, value in trial.params.items() if isinstance(value, str)}


def _mutated(rng: random.Random, value: Any, space: Any) -> Any:
    if isinstance(space, CategoricalDistribution):
        return rng.choice(space.choices) if rng.random() < _CHANCE else value
    step = rng.gauss(0.0, _SPREAD)
    if space.log:
        moved = math.exp(math.log(value) + step * math.log(space.high / space.low))
    else:
        moved = value + step * (space.high - space.low)
    moved = min(max(moved, space.low), space.high)
    return round(moved) if isinstance(space, IntDistribution) else moved


_Found = TypeVar("_Found")

_REFUSED_RISE = 10.0
"""The value that the sampler receives for recipes that cannot be measured, far above the bound."""


_NEAR = 2.0
"""Recipes whose loss is up to this many times the bound are still mutated."""

_SILENT = 1800.0
"""Seconds without a heartbeat after which a process of another machine counts as dead; its clock may differ."""

_SEEN_EVERY = 30.0
"""Seconds between two heartbeats."""


@dataclass(frozen=True)
class Trial:
    """One recipe of a study.

    Attributes:
        number: Its trial's.
        published: The method whose published numbers it has; empty if the search chose them.
        recipe: The recipe, with all that a conversion measures filled in; None if it was refused.
        measurement: Its measurement; None if it was refused.
        refusal: Why it could not be measured; empty if it could.
        seconds: How long it took.
    """

    number: int
    published: str
    recipe: Recipe | None
    measurement: Measurement | None
    refusal: str
    seconds: float

    @property
    def name(self) -> str:
        """The recipe in a few words."""
        return self.recipe.summary() if self.recipe else self.refusal


def _errors_named(method: Callable[..., _Found]) -> Callable[..., _Found]:
    """Wrap a method that reads the study, whose file may be damaged or not a study."""

    @functools.wraps(method)
    def telling(self: "Study", *given: Any) -> _Found:
        with self.place.errors_named():
            return method(self, *given)

    return telling


class Study:
    """A study in one of optuna's storages."""

    def __init__(self, place: StudyPlace, space: Space, seed: int, keep_short: float) -> None:
        self.place, self.space = place, space
        self.keep_short = keep_short
        self._starts = space.starts()
        self._seen = 0.0
        with place.errors_named():
            self._storage = place.open()
            self._study = optuna.create_study(
                storage=self._storage,
                sampler=SteadySampler(seed, len(self._starts)),
                directions=["minimize", "minimize"],
                study_name=place.name,
                load_if_exists=True,
            )

    @_errors_named
    def begin(self, header: Mapping[str, Any]) -> None:
        """Record the header of a new study and queue published recipes, or check that an existing one has the same."""
        known = self._study.user_attrs.get("header")
        if known is None:
            for method, parameters in self._starts:
                published = method.name if method.is_published else ""
                self._study.enqueue_trial(parameters, user_attrs={"published": published})
            self._study.set_user_attr("header", dict(header))
            return
        if different := keys_that_differ(known, header):
            raise CtxextError(
                f'"{self.place}" cannot be continued, it was made otherwise: '
                + "; ".join(f"{key} {known.get(key)}, now {header.get(key)}" for key in different[:3])
                + ".",
                hint="Repeat the command it was made with, or start again with --overwrite.",
            )

    @_errors_named
    def rescue(self) -> None:
        """Queue again the trials of processes that have ended, with the same parameters."""
        for trial in self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            if not _is_alive(trial):
                self.put_back(trial)

    def put_back(self, trial: optuna.trial.Trial | FrozenTrial) -> None:
        """Queue a trial again, one that ran out of time for example."""
        study_id = self._storage.get_study_id_from_name(self.place.name)
        known = self._storage.get_trial_id_from_study_id_trial_number(study_id, trial.number)
        # Another process may have been faster: then this one has come to its end, or is tried twice.
        with contextlib.suppress(optuna.exceptions.UpdateFinishedTrialError):
            self._storage.set_trial_user_attr(known, "owner", None)
            self._storage.set_trial_state_values(known, TrialState.WAITING)

    @_errors_named
    def is_due(self, limit: int | None) -> bool:
        """Whether the number of recipes tried or under way is below a limit."""
        begun = self._study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.RUNNING))
        return limit is None or len(begun) < limit

    @property
    @_errors_named
    def has_waiting(self) -> bool:
        """Whether published recipes, or trials that were killed, are queued."""
        return bool(self._study.get_trials(deepcopy=False, states=(TrialState.WAITING,)))

    @_errors_named
    def ask(self) -> tuple[optuna.trial.Trial, Parameters]:
        """The next recipe to try."""
        trial = self._study.ask()
        self.sign(trial, force=True)
        return trial, self.space.draw(trial)

    def sign(self, trial: optuna.trial.Trial, *, force: bool = False) -> None:
        """Send heartbeats while this process works on a trial."""
        if force or time.monotonic() - self._seen > _SEEN_EVERY:
            self._seen = time.monotonic()
            with contextlib.suppress(optuna.exceptions.UpdateFinishedTrialError):
                trial.set_user_attr("owner", [socket.gethostname(), os.getpid(), time.time()])

    def tell(
        self,
        trial: optuna.trial.Trial,
        stock: Measurement,
        recipe: Recipe | None,
        measurement: Measurement | None,
        refusal: str,
    ) -> None:
        """Store the result of a recipe, unless another process, which took this one for dead, has done so."""
        rise = measurement.rise(stock)[0] if measurement else _REFUSED_RISE
        # Where no needle was asked for, a recipe counts as no better than none.
        loss = measurement.loss if measurement and measurement.answers else stock.loss
        with contextlib.suppress(optuna.exceptions.UpdateFinishedTrialError):
            trial.set_constraint("short", rise - self.keep_short)
            is_near = bool(measurement and measurement.answers) and rise <= _NEAR * self.keep_short
            trial.set_user_attr("is_near", is_near)
            trial.set_user_attr("refusal", refusal)
            trial.set_user_attr("recipe", recipe.to_dict() if recipe else None)
            trial.set_user_attr("measurement", measurement.to_dict() if measurement else None)
            # As where recipes are given up: those that lose less than half of what they may count as alike in that.
            values = [loss, max(rise, self.keep_short / 2)]
            self._study.tell(trial, values, skip_if_finished=True)

    @_errors_named
    def trials(self) -> list[Trial]:
        """Every recipe that was tried, in order."""
        trials = []
        for trial in self._study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)):
            attributes = trial.user_attrs
            recipe, measurement = attributes["recipe"], attributes["measurement"]
            if measurement and not recipe:
                raise ValueError(f"trial {trial.number} was measured without a recipe")
            tried = Trial(
                trial.number,
                attributes.get("published", ""),
                recipe_from_dict(recipe, "the study") if recipe else None,
                measurement_from(measurement) if measurement else None,
                attributes["refusal"],
                trial.duration.total_seconds() if trial.duration else 0.0,
            )
            trials.append(tried)
        return trials

    def is_start(self, trial: optuna.trial.Trial) -> bool:
        """Whether a trial is one of the recipes that the search starts from, the published ones among them."""
        return "published" in trial.user_attrs


def _is_alive(trial: FrozenTrial) -> bool:
    """Whether a process works on a trial: visible on this machine, by its heartbeat on another."""
    owner = trial.user_attrs.get("owner")
    if not owner:  # Taken a moment ago, or by a process that was killed in that moment.
        begun = trial.datetime_start
        return begun is not None and (datetime.now() - begun).total_seconds() < _SEEN_EVERY
    host, process, seen = owner
    return time.time() - seen < _SILENT if host != socket.gethostname() else is_running(int(process))


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
