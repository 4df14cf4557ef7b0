"""Study of a search: tried recipes, their results, and the loop over recipes. Several processes may share it.

The sampler alternates between optuna and mutation. Its draws do not depend on interruptions of the search.
"""

import contextlib
import functools
import math
import os
import random
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any, TypeVar

from ctxext.errors import CtxextError
from ctxext.files.offline import forbid_network
from ctxext.files.output_directory import is_running
from ctxext.files.processes import machine_id
from ctxext.files.resuming import check_same_settings
from ctxext.models.recipe_applier import RecipeApplier
from ctxext.recipes.recipe import Recipe, recipe_from_dict
from ctxext.search.measurement import EvalSet, Measurement, measure, read_measurement
from ctxext.search.options import CREATED, SearchOptions, StudyPlace
from ctxext.search.space import Parameters, Space

with forbid_network():
    import optuna
    from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
    from optuna.exceptions import ExperimentalWarning, UpdateFinishedTrialError
    from optuna.samplers import TPESampler
    from optuna.trial import FrozenTrial, TrialState

_RANDOM_AT_FIRST = 10
_NUM_PARENTS = 6
_ALIKE = 2
_CHANCE = 0.15
"""Probability that a mutation redraws a categorical value."""
_SPREAD = 0.15
"""Standard deviation of a mutation, as a share of the parameter's range."""
_REFUSED_RISE = 10.0
"""Rise reported to the sampler for recipes that cannot be measured, far above the bound."""
_NEAR = 2.0
"""Largest rise of the loss, in multiples of the bound, for recipes that are still mutated."""
_SILENT = 1800.0
"""Seconds without a heartbeat until a process of another machine counts as dead; its clock may differ."""
_SEEN_EVERY = 30.0
"""Seconds between heartbeats."""
_FINALISTS = 5
_FAR = 10.0
MOST_FOR_CHECKS = 0.4
"""Largest share of the time reserved for the final evaluation; it uses fewer prompts if that is too little."""
_SPARE = 1.2
WRITING = 3.0
"""Seconds reserved for writing files and drawing pictures."""

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Trial:
    """A tried recipe of a study.

    Attributes:
        number: Trial number.
        published: The method if the parameters are its published ones; empty if the search chose them.
        recipe: The recipe, including values that a conversion measures; None if it was refused.
        measurement: Its measurement; None if it was refused.
        refusal: Reason why it could not be measured; empty if it could.
        seconds: Duration.
    """

    number: int
    published: str
    recipe: Recipe | None
    measurement: Measurement | None
    refusal: str
    seconds: float

    @property
    def name(self) -> str:
        """Short description of the recipe."""
        return self.recipe.summary() if self.recipe else self.refusal


@dataclass(frozen=True)
class Point:
    """A completely measured recipe.

    Attributes:
        trial: The recipe.
        loss: Mean bounded loss of the answers, from 0 to 1, over all lengths.
        rise: Relative rise of the loss at the original context length.
        sure_rise: Upper end of the 95 % interval of the rise.
    """

    trial: Trial
    loss: float
    rise: float
    sure_rise: float

    def dominates(self, loss: float, rise: float) -> bool:
        """Return whether it is better than a recipe with these values in one objective and not worse in the other."""
        return self.loss <= loss and self.rise <= rise and (self.loss, self.rise) != (loss, rise)


def find_points(trials: Sequence[Trial], stock: Measurement) -> list[Point]:
    """Return the completely measured recipes, in order."""
    points = []
    for trial in trials:
        if trial.measurement is not None and trial.measurement.is_whole:
            rise, half = trial.measurement.rise(stock)
            points.append(Point(trial, trial.measurement.loss, rise, rise + half))
    return points


def find_pareto_front(points: Sequence[Point]) -> list[Point]:
    """Return the points that no other point dominates, lowest loss first."""
    front = [point for point in points if not any(rival.dominates(point.loss, point.rise) for rival in points)]
    return sorted(front, key=lambda point: (point.loss, point.rise))


def choose_best(points: Sequence[Point], keep_short: float) -> Point | None:
    """Return the point with the lowest loss among those with `sure_rise` within the bound; the first if equal."""
    candidates = [point for point in points if point.sure_rise <= keep_short]
    return min(candidates, key=lambda point: (point.loss, point.trial.number), default=None)


def is_hopeless(measurement: Measurement, stock: Measurement, points: Sequence[Point], keep_short: float) -> bool:
    """Return whether the rest of a recipe's measurement can be skipped.

    Either the rise at the original context length exceeds the bound, or the loss so far guarantees that another recipe
    dominates it. Rises below half of the bound count as equal.
    """
    rise = measurement.rise(stock)[0]
    alike = max(rise, keep_short / 2)
    return rise > keep_short or any(point.dominates(measurement.least_loss, alike) for point in points)


def choose_finalists(points: Sequence[Point], keep_short: float) -> list[Point]:
    """Return the best recipes within the bound on the documents of the trials, and all published ones, best first."""
    candidates = sorted(
        (point for point in points if point.rise <= keep_short), key=lambda point: (point.loss, point.trial.number)
    )
    return [point for place, point in enumerate(candidates) if place < _FINALISTS or point.trial.published]


@dataclass(frozen=True)
class SearchState:
    """State of a search, for display.

    Attributes:
        stage: Current stage.
        stock: Measurement of the unmodified model; None before it exists.
        trials: All tried recipes, in order.
        points: The completely measured ones.
        best: The best so far within the bound at the original context length.
        end: Deadline on the monotonic clock in seconds; infinite if only trials are limited.
        max_trials: Maximum number of trials; None if only time is limited.
    """

    stage: str
    stock: Measurement | None = None
    trials: Sequence[Trial] = ()
    points: Sequence[Point] = ()
    best: Point | None = None
    end: float = math.inf
    max_trials: int | None = None


Watch = Callable[[SearchState], None]


@dataclass(frozen=True)
class TrialSetup:
    """Setup for trying recipes.

    Attributes:
        applier: Applies recipes to the model.
        options: Options of the search.
        eval_set: Eval set of the trials.
        stock: Measurement of the unmodified model.
        stock_seconds: Its duration.
        watch: Called before each recipe.
        end: Deadline of the whole run on the monotonic clock in seconds.
    """

    applier: RecipeApplier
    options: SearchOptions
    eval_set: EvalSet
    stock: Measurement
    stock_seconds: float
    watch: Watch
    end: float

    def reserve(self, points: Sequence[Point]) -> float:
        """Estimate the seconds to reserve for the final evaluation, up to a share of the time."""
        if math.isinf(self.end):
            return 0.0
        seconds = self.stock_seconds + sum(
            point.trial.seconds for point in choose_finalists(points, self.options.keep_short)
        )
        checks = seconds * (2 + self.options.checked / self.options.samples) + 2 * self.stock_seconds
        return min(MOST_FOR_CHECKS * self.options.seconds, _SPARE * checks + WRITING)


class SteadySampler(TPESampler):
    """Sampler that alternates between multi-objective TPE (Ozaki et al. 2022) and mutation.

    A mutation changes one of the best recipes slightly, as in LongRoPE's evolution (Ding et al. 2024, section 3.2):
    models of the whole space need more trials than most searches have. All draws are seeded by the seed of the search
    and the trial number, so that an interruption changes neither the interrupted trial nor later ones.

    The first `num_known` trials are not drawn.
    """

    def __init__(self, seed: int, num_known: int) -> None:
        self.seed, self.num_known = seed, num_known
        self._parent: FrozenTrial | None = None
        self._begin(0)

    def _begin(self, number: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            super().__init__(
                n_startup_trials=self.num_known + _RANDOM_AT_FIRST,
                multivariate=True,
                group=True,
                constant_liar=True,
                seed=self._make_random(number).getrandbits(32),
            )

    def _make_random(self, number: int) -> random.Random:
        return random.Random(f"{self.seed} {number}")

    def before_trial(self, study: optuna.Study, trial: FrozenTrial) -> None:
        """Seed the sampler for the trial."""
        self._begin(trial.number)

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """Return the parameters that are drawn together."""
        # Kept for the draw: another process may finish a better recipe before it.
        self._parent = self._choose_parent(study, trial.number)
        return self._parent.distributions if self._parent else super().infer_relative_search_space(study, trial)

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Draw the parameters together."""
        parent = self._parent
        if parent is None:
            return super().sample_relative(study, trial, search_space)
        rng = self._make_random(trial.number)
        return {name: _mutate(rng, parent.params[name], space) for name, space in search_space.items()}

    def _choose_parent(self, study: optuna.Study, number: int) -> FrozenTrial | None:
        """Choose the recipe to mutate, among the best that keep the bound or nearly do."""
        if number < self.num_known or number % 2:
            return None
        finished = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        near = [trial for trial in finished if trial.user_attrs["is_near"] and trial.number < number]
        best: list[FrozenTrial] = []
        for trial in sorted(near, key=lambda trial: (trial.values[0], trial.number)):
            # Limit recipes of the same kind, so that the first good kind does not crowd out a better one.
            if (
                sum(_list_choices(trial) == _list_choices(parent) for parent in best) < _ALIKE
                and len(best) < _NUM_PARENTS
            ):
                best.append(trial)
        return self._make_random(number).choice(best) if best else None


def _list_choices(trial: FrozenTrial) -> set[tuple[str, str]]:
    """Return the categorical values, including methods."""
    return {(name, value) for name, value in trial.params.items() if isinstance(value, str)}


def _mutate(rng: random.Random, value: Any, space: Any) -> Any:
    if isinstance(space, CategoricalDistribution):
        return rng.choice(space.choices) if rng.random() < _CHANCE else value
    step = rng.gauss(0.0, _SPREAD)
    if space.log:
        moved = math.exp(math.log(value) + step * math.log(space.high / space.low))
    else:
        moved = value + step * (space.high - space.low)
    moved = min(max(moved, space.low), space.high)
    return round(moved) if isinstance(space, IntDistribution) else moved


def _explain_errors(method: Callable[..., _Result]) -> Callable[..., _Result]:
    """Wrap a method that reads the study, to report a damaged file or one that is not a study."""

    @functools.wraps(method)
    def wrapper(self: "Study", *arguments: Any, **named: Any) -> _Result:
        with self.place.explain_errors():
            return method(self, *arguments, **named)

    return wrapper


class Study:
    """A study in one of optuna's storages.

    Args:
        place: The storage. A study that does not exist is created; several processes may do so at once.
        space: The recipes.
        seed: Seed of the search.
        keep_short: The bound.
        replaces: When the study to replace was created, as `StudyPlace.check` returns it; a newer one is joined.
    """

    def __init__(
        self, place: StudyPlace, space: Space, seed: int, keep_short: float, replaces: float | None = None
    ) -> None:
        self.place, self.space = place, space
        self.keep_short = keep_short
        self._starts = space.starts()
        self._seen = 0.0
        with place.lock():
            if replaces is not None and place.get_creation_time() == replaces:
                _raise_if_used(place)
                place.clear()
            self._storage = place.open()
            self._study = optuna.create_study(
                storage=self._storage,
                sampler=SteadySampler(seed, len(self._starts)),
                directions=["minimize", "minimize"],
                study_name=place.name,
                load_if_exists=True,
            )
            if not self._study.user_attrs:
                self._study.set_user_attr(CREATED, time.time())

    def begin(self, header: Mapping[str, Any]) -> None:
        """Write the header of a new study and queue published recipes; raise if an existing study differs."""
        with self.place.lock():
            earlier = self._study.user_attrs.get("header")
            if earlier is None:
                # A process that was killed here may have queued some of them.
                for method, parameters in self._starts[len(self._study.get_trials(deepcopy=False)) :]:
                    published = method.name if method.is_published else ""
                    self._study.enqueue_trial(parameters, user_attrs={"published": published})
                self._study.set_user_attr("header", dict(header))
                return
        check_same_settings(self.place, earlier, header)

    @_explain_errors
    def rescue(self) -> None:
        """Requeue the trials of processes that have ended, with the same parameters."""
        if self._list_abandoned():
            with self.place.lock():  # Another process may have requeued them and begun to work on one.
                for trial in self._list_abandoned():
                    self.put_back(trial)

    @_explain_errors
    def has_abandoned(self) -> bool:
        """Return whether a process has ended that worked on a trial; wait if it is unknown which process does.

        A process may have been killed before it signed its trial. The others leave that trial alone for a while.
        """
        until = time.monotonic() + _SEEN_EVERY
        while any(not trial.user_attrs.get("owner") for trial in self._list_running()) and time.monotonic() < until:
            time.sleep(1)
        return bool(self._list_abandoned())

    def _list_running(self) -> list[FrozenTrial]:
        return self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))

    def _list_abandoned(self) -> list[FrozenTrial]:
        return [trial for trial in self._list_running() if not _is_alive(trial)]

    @_explain_errors
    def put_back(self, trial: optuna.trial.Trial | FrozenTrial) -> None:
        """Requeue a trial, for example one that ran out of time."""
        study_id = self._storage.get_study_id_from_name(self.place.name)
        trial_id = self._storage.get_trial_id_from_study_id_trial_number(study_id, trial.number)
        # Another process may have taken it: then the trial is finished, or tried twice.
        with contextlib.suppress(UpdateFinishedTrialError):
            self._storage.set_trial_user_attr(trial_id, "owner", None)
            self._storage.set_trial_state_values(trial_id, TrialState.WAITING)

    @_explain_errors
    def is_due(self, limit: int | None) -> bool:
        """Return whether recipes are queued, or fewer than the limit are tried or running."""
        states = [trial.state for trial in self._study.get_trials(deepcopy=False)]
        begun = states.count(TrialState.COMPLETE) + states.count(TrialState.RUNNING)
        return limit is None or begun < limit or TrialState.WAITING in states

    @_explain_errors
    def ask(self) -> tuple[optuna.trial.Trial, Parameters]:
        """Return the next trial and its parameters."""
        trial = self._study.ask()
        self.sign(trial, force=True)
        return trial, self.space.draw(trial)

    @_explain_errors
    def sign(self, trial: optuna.trial.Trial, *, force: bool = False) -> None:
        """Send heartbeats while this process works on a trial."""
        if force or time.monotonic() - self._seen > _SEEN_EVERY:
            self._seen = time.monotonic()
            with contextlib.suppress(UpdateFinishedTrialError):
                trial.set_user_attr("owner", [machine_id(), os.getpid(), time.time()])

    @_explain_errors
    def record(
        self,
        trial: optuna.trial.Trial,
        stock: Measurement,
        recipe: Recipe | None,
        measurement: Measurement | None,
        refusal: str,
    ) -> None:
        """Store the result of a recipe, unless another process has done so because this one seemed dead."""
        rise = measurement.rise(stock)[0] if measurement else _REFUSED_RISE
        # Without a measured needle, a recipe counts as no better than the unmodified model.
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

    @_explain_errors
    def trials(self) -> list[Trial]:
        """Return all tried recipes, in order."""
        trials = []
        for trial in self._study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)):
            attributes = trial.user_attrs
            recipe, measurement = attributes["recipe"], attributes["measurement"]
            if measurement and not recipe:
                raise ValueError(f"trial {trial.number} was measured without a recipe")
            entry = Trial(
                trial.number,
                attributes.get("published", ""),
                recipe_from_dict(recipe, "the study") if recipe else None,
                read_measurement(measurement) if measurement else None,
                attributes["refusal"],
                trial.duration.total_seconds() if trial.duration else 0.0,
            )
            trials.append(entry)
        return trials


def _raise_if_used(place: StudyPlace) -> None:
    """Raise if another process of this machine works on a study: without its file it would damage the next one."""
    trials: Sequence[FrozenTrial] = ()
    with contextlib.suppress(CtxextError), place.explain_errors():  # A file that is not a study is not used.
        trials = optuna.load_study(study_name=place.name, storage=place.open()).get_trials(deepcopy=False)
    for trial in trials:
        host, process, _ = trial.user_attrs.get("owner") or ("", 0, 0)
        if trial.state == TrialState.RUNNING and host == machine_id() and is_running(int(process)):
            raise CtxextError(
                f'The study "{place}" cannot be replaced: process {process} works on it.',
                hint="Wait until it has finished, or choose another --study.",
            )


def _is_alive(trial: FrozenTrial) -> bool:
    """Return whether a process works on a trial: by its id on this machine, by its heartbeat on another."""
    owner = trial.user_attrs.get("owner")
    if not owner:  # It was taken just now, or its process was killed at that moment.
        begun = trial.datetime_start
        return begun is not None and (datetime.now() - begun).total_seconds() < _SEEN_EVERY
    host, process, seen = owner
    return time.time() - seen < _SILENT if host != machine_id() else is_running(int(process))


class _TimeIsUp(Exception):
    """The time is up before a recipe is completely measured."""


def try_recipes(
    setup: TrialSetup, space: Space, place: StudyPlace, header: Mapping[str, Any], replaces: float | None = None
) -> SearchState:
    """Try recipes while enough time is left for the final evaluation; `replaces` is that of `Study`."""
    options = setup.options
    study = Study(place, space, options.seed, options.keep_short, replaces)
    study.begin(header)
    while True:
        study.rescue()
        trials = study.trials()
        points = find_points(trials, setup.stock)
        best = choose_best(points, options.keep_short)
        state = SearchState("trying recipes", setup.stock, trials, points, best, setup.end, options.trials)
        stop_at = setup.end - setup.reserve(points)
        if time.monotonic() > stop_at:
            return state
        if not study.is_due(options.trials):
            if study.has_abandoned():
                continue
            return state
        setup.watch(state)
        trial, parameters = study.ask()

        def check_time(trial: optuna.trial.Trial = trial, stop_at: float = stop_at) -> None:
            study.sign(trial)
            if time.monotonic() > stop_at:
                raise _TimeIsUp

        try:
            is_start = "published" in trial.user_attrs
            study.record(trial, setup.stock, *_try_recipe(setup, space, parameters, state, is_start, check_time))
        except _TimeIsUp:
            study.put_back(trial)
            return state
        except (KeyboardInterrupt, Exception):
            # Other processes, also those on other machines, need not wait until this one counts as dead.
            with contextlib.suppress(CtxextError):
                study.put_back(trial)
            raise


def _try_recipe(
    setup: TrialSetup,
    space: Space,
    parameters: Parameters,
    state: SearchState,
    is_start: bool,
    check_time: Callable[[], None],
) -> tuple[Recipe | None, Measurement | None, str]:
    """Return the recipe, its measurement, and the reason if there is none.

    Initial recipes, including the published ones, are completely measured if they are near the bound and not dominated,
    because others are compared with them.
    """

    def stop(measurement: Measurement) -> bool:
        check_time()
        if is_start:
            rise = measurement.rise(setup.stock)[0]
            return rise > _FAR * setup.options.keep_short or any(
                point.dominates(measurement.least_loss, rise) for point in state.points
            )
        return is_hopeless(measurement, setup.stock, state.points, setup.options.keep_short)

    try:
        recipe = setup.applier.prepare(space.recipe(parameters))
        earlier = next((done for done in state.trials if done.recipe and done.recipe.steps == recipe.steps), None)
        if earlier is not None:
            return recipe, earlier.measurement, ""
        return recipe, measure(setup.applier.apply(recipe), setup.eval_set, stop), ""
    except CtxextError as error:
        return None, None, error.message
