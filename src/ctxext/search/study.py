"""The study: recipes tried, their results, and the loop that tries the next. Several processes may share it.

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
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any, TypeVar

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.exceptions import ExperimentalWarning, UpdateFinishedTrialError
from optuna.samplers import TPESampler
from optuna.trial import FrozenTrial, TrialState

from ctxext.errors import CtxextError
from ctxext.evaluate.workbench import Workbench
from ctxext.files.content import keys_that_differ
from ctxext.files.output_directory import is_running
from ctxext.recipes.recipe import Recipe, recipe_from_dict
from ctxext.search.measurement import EvalSet, Measurement, measure, measurement_from
from ctxext.search.options import SearchOptions, StudyPlace
from ctxext.search.space import Parameters, Space

_RANDOM_AT_FIRST = 10
_NUM_PARENTS = 6
_ALIKE = 2
_CHANCE = 0.15
"""The probability that a mutation draws a categorical value again."""
_SPREAD = 0.15
"""The standard deviation of a mutation, as a share of the number's range."""
_REFUSED_RISE = 10.0
"""The value that the sampler receives for recipes that cannot be measured, far above the bound."""
_NEAR = 2.0
"""Largest rise of the loss, in multiples of the bound, for recipes that are still mutated."""
_SILENT = 1800.0
"""Seconds without a heartbeat after which a process of another machine counts as dead; its clock may differ."""
_SEEN_EVERY = 30.0
"""Seconds between two heartbeats."""
_FINALISTS = 5
_FAR = 10.0
MOST_FOR_CHECKS = 0.4
"""The largest share of the time reserved for the last checks; they use fewer prompts if that is too little."""
_SPARE = 1.2
WRITING = 3.0
"""Seconds reserved for writing files and drawing pictures."""

_Found = TypeVar("_Found")


@dataclass(frozen=True)
class Trial:
    """One recipe of a study.

    Attributes:
        number: The number of its trial.
        published: The method with these published parameters; empty if the search chose them.
        recipe: The recipe, with all values that a conversion measures filled in; None if it was refused.
        measurement: Its measurement; None if it was refused.
        refusal: The reason it could not be measured; empty if it could.
        seconds: The time it took.
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


@dataclass(frozen=True)
class Point:
    """A recipe that was measured to the end.

    Attributes:
        trial: The recipe.
        loss: Mean bounded loss of the answers, from 0 to 1, over all lengths.
        rise: The relative rise of the loss at the original context length.
        sure_rise: The upper end of the 95 % interval of the rise.
    """

    trial: Trial
    loss: float
    rise: float
    sure_rise: float

    def dominates(self, loss: float, rise: float) -> bool:
        """Return whether it is better than a recipe with these values in one aim and no worse in the other."""
        return self.loss <= loss and self.rise <= rise and (self.loss, self.rise) != (loss, rise)


def points_of(trials: Sequence[Trial], stock: Measurement) -> list[Point]:
    """Return the recipes that were measured to the end, in order."""
    points = []
    for one in trials:
        if one.measurement is not None and one.measurement.is_whole:
            rise, half = one.measurement.rise(stock)
            points.append(Point(one, one.measurement.loss, rise, rise + half))
    return points


def pareto_front(points: Sequence[Point]) -> list[Point]:
    """Return the points that no other dominates, lowest loss first."""
    front = [point for point in points if not any(other.dominates(point.loss, point.rise) for other in points)]
    return sorted(front, key=lambda point: (point.loss, point.rise))


def best_of(points: Sequence[Point], keep_short: float) -> Point | None:
    """Return the point with the lowest loss among those with `sure_rise` within the bound; the earlier if equal."""
    kept = [point for point in points if point.sure_rise <= keep_short]
    return min(kept, key=lambda point: (point.loss, point.trial.number), default=None)


def is_hopeless(measurement: Measurement, stock: Measurement, points: Sequence[Point], keep_short: float) -> bool:
    """Return whether a recipe that is being measured is not worth the rest of its eval set.

    Either the rise at the original context length exceeds the bound, or the loss so far already guarantees that
    another recipe dominates it. Rises below half of the bound count as equal.
    """
    rise = measurement.rise(stock)[0]
    alike = max(rise, keep_short / 2)
    return rise > keep_short or any(point.dominates(measurement.least_loss, alike) for point in points)


def finalists_of(points: Sequence[Point], keep_short: float) -> list[Point]:
    """Return the best that keep the bound on the search's own documents, and all published ones that do, best first."""
    kept = sorted(
        (point for point in points if point.rise <= keep_short), key=lambda point: (point.loss, point.trial.number)
    )
    return [point for place, point in enumerate(kept) if place < _FINALISTS or point.trial.published]


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


@dataclass(frozen=True)
class Ground:
    """The setup of trying recipes.

    Attributes:
        bench: The model.
        options: The options of the search.
        eval_set: The eval set of every trial.
        stock: The plain model's answers to it.
        stock_seconds: The time these took.
        watch: Called before each recipe.
        end: The deadline of the whole run, on the monotonic clock in seconds.
    """

    bench: Workbench
    options: SearchOptions
    eval_set: EvalSet
    stock: Measurement
    stock_seconds: float
    watch: Watch
    end: float

    def reserve(self, points: Sequence[Point]) -> float:
        """Return the seconds to reserve for the last checks: estimated from the measurements, up to a share."""
        if math.isinf(self.end):
            return 0.0
        seconds = self.stock_seconds + sum(
            point.trial.seconds for point in finalists_of(points, self.options.keep_short)
        )
        checks = seconds * (2 + self.options.checked / self.options.samples) + 2 * self.stock_seconds
        return min(MOST_FOR_CHECKS * self.options.seconds, _SPARE * checks + WRITING)


class SteadySampler(TPESampler):
    """Draws every second recipe by a multi-objective TPE sampler (Ozaki et al. 2022), the others by mutation.

    A mutation changes one of the best recipes a little, as in LongRoPE's evolution (Ding et al. 2024, section 3.2):
    models of the whole space need more trials than most searches have. Everything is seeded by the search's seed and
    the trial's number, so that an interrupted trial is drawn again with the same values, and those after it as without
    the interruption.

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
        """Seed again for the trial."""
        self._begin(trial.number)

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """Return the parameters that are drawn together."""
        parent = self._parent(study, trial.number)
        return parent.distributions if parent else super().infer_relative_search_space(study, trial)

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Draw the parameters together."""
        parent = self._parent(study, trial.number)
        if parent is None:
            return super().sample_relative(study, trial, search_space)
        rng = self._random(trial.number)
        return {name: _mutated(rng, parent.params[name], space) for name, space in search_space.items()}

    def _parent(self, study: optuna.Study, number: int) -> FrozenTrial | None:
        """Choose the recipe to mutate: one of the best that keep the bound, or nearly do."""
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
    """Return the categorical values chosen, methods among them."""
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


def _errors_named(method: Callable[..., _Found]) -> Callable[..., _Found]:
    """Wrap a method that reads the study, to report a damaged file or one that is no study."""

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
        # Another process may have been faster: then the trial is finished, or is tried twice.
        with contextlib.suppress(UpdateFinishedTrialError):
            self._storage.set_trial_user_attr(known, "owner", None)
            self._storage.set_trial_state_values(known, TrialState.WAITING)

    @_errors_named
    def is_due(self, limit: int | None) -> bool:
        """Return whether fewer recipes than a limit are tried or under way, or some are queued."""
        states = [trial.state for trial in self._study.get_trials(deepcopy=False)]
        begun = states.count(TrialState.COMPLETE) + states.count(TrialState.RUNNING)
        return limit is None or begun < limit or TrialState.WAITING in states

    @_errors_named
    def ask(self) -> tuple[optuna.trial.Trial, Parameters]:
        """Return the next trial and its parameters."""
        trial = self._study.ask()
        self.sign(trial, force=True)
        return trial, self.space.draw(trial)

    def sign(self, trial: optuna.trial.Trial, *, force: bool = False) -> None:
        """Send heartbeats while this process works on a trial."""
        if force or time.monotonic() - self._seen > _SEEN_EVERY:
            self._seen = time.monotonic()
            with contextlib.suppress(UpdateFinishedTrialError):
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
        # Without a measured needle, a recipe counts as no better than the plain model.
        loss = measurement.loss if measurement and measurement.answers else stock.loss
        with contextlib.suppress(UpdateFinishedTrialError):
            trial.set_constraint("short", rise - self.keep_short)
            is_near = bool(measurement and measurement.answers) and rise <= _NEAR * self.keep_short
            trial.set_user_attr("is_near", is_near)
            trial.set_user_attr("refusal", refusal)
            trial.set_user_attr("recipe", recipe.to_dict() if recipe else None)
            trial.set_user_attr("measurement", asdict(measurement) if measurement else None)
            # As in `is_hopeless`, rises below half of the bound count as equal.
            values = [loss, max(rise, self.keep_short / 2)]
            self._study.tell(trial, values, skip_if_finished=True)

    @_errors_named
    def trials(self) -> list[Trial]:
        """Return every recipe that was tried, in order."""
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


def _is_alive(trial: FrozenTrial) -> bool:
    """Return whether a process works on a trial: visible on this machine, by its heartbeat on another."""
    owner = trial.user_attrs.get("owner")
    if not owner:  # Taken a moment ago, or by a process that was killed in that moment.
        begun = trial.datetime_start
        return begun is not None and (datetime.now() - begun).total_seconds() < _SEEN_EVERY
    host, process, seen = owner
    return time.time() - seen < _SILENT if host != socket.gethostname() else is_running(int(process))


class _TimeIsUp(Exception):
    """The time is up before a recipe is measured to the end."""


def try_recipes(ground: Ground, space: Space, place: StudyPlace, header: Mapping[str, Any]) -> Standing:
    """Try recipes while enough time is left for the last checks of the best."""
    options = ground.options
    study = Study(place, space, options.seed, options.keep_short)
    study.begin(header)
    while True:
        study.rescue()
        trials = study.trials()
        points = points_of(trials, ground.stock)
        best = best_of(points, options.keep_short)
        standing = Standing("trying recipes", ground.stock, trials, points, best, ground.end, options.trials)
        stop_at = ground.end - ground.reserve(points)
        if not study.is_due(options.trials) or time.monotonic() > stop_at:
            return standing
        ground.watch(standing)
        trial, parameters = study.ask()

        def look(trial: optuna.trial.Trial = trial, stop_at: float = stop_at) -> None:
            study.sign(trial)
            if time.monotonic() > stop_at:
                raise _TimeIsUp

        try:
            is_start = "published" in trial.user_attrs
            study.tell(trial, ground.stock, *_tried(ground, space, parameters, standing, is_start, look))
        except _TimeIsUp:
            study.put_back(trial)
            return standing


def _tried(
    ground: Ground,
    space: Space,
    parameters: Parameters,
    standing: Standing,
    is_start: bool,
    look: Callable[[], None],
) -> tuple[Recipe | None, Measurement | None, str]:
    """Return a recipe's result: the recipe, its measurement, and the reason if there is none.

    Recipes that the search starts from, the published ones among them, are measured to the end if near and not
    dominated, as others are compared with them.
    """

    def stop(measurement: Measurement) -> bool:
        look()
        if is_start:
            rise = measurement.rise(ground.stock)[0]
            return rise > _FAR * ground.options.keep_short or any(
                point.dominates(measurement.least_loss, rise) for point in standing.points
            )
        return is_hopeless(measurement, ground.stock, standing.points, ground.options.keep_short)

    try:
        recipe = ground.bench.prepare(space.recipe(parameters))
        known = next((one for one in standing.trials if one.recipe and one.recipe.steps == recipe.steps), None)
        if known is not None:
            return recipe, known.measurement, ""
        return recipe, measure(ground.bench.apply(recipe), ground.eval_set, stop), ""
    except CtxextError as error:
        return None, None, error.message
