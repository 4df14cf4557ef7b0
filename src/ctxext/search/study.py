"""The study: recipes tried, their results, and the next one. Several processes may share it."""

import contextlib
import functools
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeVar

import optuna
from optuna.trial import FrozenTrial, TrialState

from ctxext.errors import CtxextError
from ctxext.files.output_directory import is_running
from ctxext.recipes.recipe import Recipe, recipe_from_dict
from ctxext.search.measurement import Measurement, measurement_from
from ctxext.search.sampler import SteadySampler
from ctxext.search.space import Parameters, Space
from ctxext.search.storage import StudyPlace

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
    """A study in one of optuna's storages.

    Args:
        place: Where it is kept.
        space: The search space.
        seed: Decides what is drawn.
        keep_short: The share by which the loss at the original context length may rise.
    """

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
        """Record the header of a new study and queue the published recipes, or check that an existing one has the same.

        Raises:
            CtxextError: the study is about something else.
        """
        known = self._study.user_attrs.get("header")
        if known is None:
            for method, parameters in self._starts:
                published = method.name if method.is_published else ""
                self._study.enqueue_trial(parameters, user_attrs={"published": published})
            self._study.set_user_attr("header", dict(header))
            return
        different = [key for key in {**known, **header} if known.get(key) != header.get(key)]
        if different:
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
                self._line_up(trial.number)

    def put_back(self, trial: optuna.trial.Trial) -> None:
        """Queue again a trial that ran out of time."""
        self._line_up(trial.number)

    def _line_up(self, number: int) -> None:
        study_id = self._storage.get_study_id_from_name(self.place.name)
        known = self._storage.get_trial_id_from_study_id_trial_number(study_id, number)
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
        finished = self._study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        return [_trial_of(trial) for trial in finished]

    def is_start(self, trial: optuna.trial.Trial) -> bool:
        """Whether a trial is one of the recipes that the search starts from, the published ones among them."""
        return "published" in trial.user_attrs


def _trial_of(trial: FrozenTrial) -> Trial:
    attributes = trial.user_attrs
    recipe, measurement = attributes["recipe"], attributes["measurement"]
    if measurement and not recipe:
        raise ValueError(f"trial {trial.number} was measured without a recipe")
    return Trial(
        trial.number,
        attributes.get("published", ""),
        recipe_from_dict(recipe, "the study") if recipe else None,
        measurement_from(measurement) if measurement else None,
        attributes["refusal"],
        trial.duration.total_seconds() if trial.duration else 0.0,
    )


def _is_alive(trial: FrozenTrial) -> bool:
    """Whether a process works on a trial: visible on this machine, by its heartbeat on another."""
    owner = trial.user_attrs.get("owner")
    if not owner:  # Taken a moment ago, or by a process that was killed in that moment.
        begun = trial.datetime_start
        return begun is not None and (datetime.now() - begun).total_seconds() < _SEEN_EVERY
    host, process, seen = owner
    return time.time() - seen < _SILENT if host != socket.gethostname() else is_running(int(process))
