"""The study on disk: which recipes were tried, what came of each, and which is next. Several processes may share it."""

import contextlib
import functools
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import optuna
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.exc import SQLAlchemyError

from ctxext.converters.output_directory import is_running
from ctxext.errors import CtxextError
from ctxext.recipes.recipe import Recipe, recipe_from_dict
from ctxext.search.measurement import Measurement, measurement_from
from ctxext.search.sampler import SteadySampler
from ctxext.search.space import Parameters, Space

_Found = TypeVar("_Found")

_NAME = "ctxext"
_REFUSED_RISE = 10.0
"""What the sampler is told of recipes that cannot be measured: far more than may be lost."""


_NEAR = 2.0
"""Recipes that lose up to so many times what they may are still worth changing a little."""


@dataclass(frozen=True)
class Trial:
    """One recipe of a study.

    Attributes:
        number: Its trial's.
        published: The method whose published numbers it has; empty where the search chose them.
        recipe: With everything measured that a conversion would measure; None where it was refused.
        measurement: What came of it; None where it was refused.
        refusal: Why it could not be measured; empty where it could.
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
        """In a few words."""
        return self.recipe.summary() if self.recipe else self.refusal


@contextlib.contextmanager
def _database_told(path: Path) -> Iterator[None]:
    try:
        yield
    except (SQLAlchemyError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        # The last ones are what a file brings about that a search did not write, or that was damaged.
        first = (str(error).splitlines() or [""])[0]
        told = first if isinstance(error, SQLAlchemyError) else f"{type(error).__name__}: {first}"
        raise CtxextError(f'The study "{path}" cannot be used: {told}', hint="Name another with --study.") from error


def _told(method: Callable[..., _Found]) -> Callable[..., _Found]:
    """A method of a study whose file may be damaged, or a stranger's."""

    @functools.wraps(method)
    def telling(self: "Study", *given: Any) -> _Found:
        with _database_told(self.path):
            return method(self, *given)

    return telling


class Study:
    """A study in a SQLite file.

    Args:
        path: The file.
        space: What can be tried.
        seed: Decides what is drawn.
        keep_short: The share by which the loss at the original context length may rise.
    """

    def __init__(self, path: Path, space: Space, seed: int, keep_short: float) -> None:
        self.path, self.space = path, space
        self.keep_short = keep_short
        self._starts = space.starts()
        sampler = SteadySampler(seed, len(self._starts))
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        with _database_told(path):
            connecting = {"connect_args": {"timeout": 60}}
            self._storage = optuna.storages.RDBStorage(f"sqlite:///{path}", engine_kwargs=connecting)
            self._study = optuna.create_study(
                storage=self._storage,
                sampler=sampler,
                directions=["minimize", "minimize"],
                study_name=_NAME,
                load_if_exists=True,
            )

    @_told
    def begin(self, header: Mapping[str, Any]) -> None:
        """Note what a new study is about and line up the published recipes, or check that an old one is the same.

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
                f'"{self.path}" cannot be continued, it was made otherwise: '
                + "; ".join(f"{key} {known.get(key)}, now {header.get(key)}" for key in different[:3])
                + ".",
                hint="Repeat the command it was made with, or start again with --overwrite.",
            )

    @_told
    def rescue(self) -> None:
        """Line up again what processes were trying that are no more: the same trials, with what was drawn for them."""
        study_id = self._storage.get_study_id_from_name(_NAME)
        for trial in self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            if not _is_alive(trial.user_attrs.get("owner")):
                known = self._storage.get_trial_id_from_study_id_trial_number(study_id, trial.number)
                # Another process may have been faster.
                with contextlib.suppress(optuna.exceptions.UpdateFinishedTrialError):
                    self._storage.set_trial_state_values(known, TrialState.WAITING)

    @_told
    def is_due(self, limit: int | None) -> bool:
        """Whether fewer recipes than a limit were tried or are being tried."""
        begun = self._study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.RUNNING))
        return limit is None or len(begun) < limit

    @property
    @_told
    def has_waiting(self) -> bool:
        """Whether published recipes, or some that a kill cut short, are lined up."""
        return bool(self._study.get_trials(deepcopy=False, states=(TrialState.WAITING,)))

    @_told
    def ask(self) -> tuple[optuna.trial.Trial, Parameters]:
        """The next recipe to try."""
        trial = self._study.ask()
        trial.set_user_attr("owner", [socket.gethostname(), os.getpid()])
        return trial, self.space.draw(trial)

    def tell(
        self,
        trial: optuna.trial.Trial,
        stock: Measurement,
        recipe: Recipe | None,
        measurement: Measurement | None,
        refusal: str,
    ) -> None:
        """Keep what came of a recipe."""
        rise = measurement.rise(stock)[0] if measurement else _REFUSED_RISE
        # Where no needle was asked for, a recipe counts as no better than none.
        loss = measurement.loss if measurement and measurement.answers else stock.loss
        trial.set_constraint("short", rise - self.keep_short)
        trial.set_user_attr("is_near", bool(measurement and measurement.answers) and rise <= _NEAR * self.keep_short)
        trial.set_user_attr("refusal", refusal)
        trial.set_user_attr("recipe", recipe.to_dict() if recipe else None)
        trial.set_user_attr("measurement", measurement.to_dict() if measurement else None)
        # As where recipes are given up: those that lose less than half of what they may count as alike in that.
        self._study.tell(trial, [loss, max(rise, self.keep_short / 2)])

    @_told
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
    return Trial(
        trial.number,
        attributes.get("published", ""),
        recipe_from_dict(recipe, "the study") if recipe else None,
        measurement_from(measurement) if measurement else None,
        attributes["refusal"],
        trial.duration.total_seconds() if trial.duration else 0.0,
    )


def _is_alive(owner: Any) -> bool:
    """Whether a trial's process still works; what another machine does cannot be seen from here."""
    if not owner:
        return False
    host, process = owner
    return host != socket.gethostname() or is_running(int(process))


def check_study(path: Path, *, resume: bool, overwrite: bool) -> None:
    """Refuse a study that is there unasked, or is not there where one is to be continued.

    Raises:
        CtxextError: it is refused.
    """
    if path.exists() and not (resume or overwrite):
        raise CtxextError(
            f'There is a study "{path}" already.', hint="Go on with it: --resume. Start again: --overwrite."
        )
    if resume and not path.exists():
        raise CtxextError(f'There is no study "{path}" to go on with.', hint="Leave --resume away.")
    if not path.resolve().parent.is_dir():
        raise CtxextError(f'There is no folder "{path.parent}" for the study.', hint="Make it, or choose another OUT.")
