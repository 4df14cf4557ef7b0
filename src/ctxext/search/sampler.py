"""The sampler: optuna's and mutation in turn, with draws that do not depend on interruptions of the search."""

import math
import random
import warnings
from collections.abc import Sequence
from typing import Any

from optuna import Study
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.exceptions import ExperimentalWarning
from optuna.samplers import BaseSampler, TPESampler
from optuna.trial import FrozenTrial, TrialState

_RANDOM_AT_FIRST = 10
_NUM_PARENTS = 6
_ALIKE = 2
_CHANCE = 0.15
"""The probability that a mutation draws a categorical value again."""
_SPREAD = 0.15
"""The standard deviation of a mutation, as a share of the number's range."""


class SteadySampler(BaseSampler):
    """Draws every second recipe by a multi-objective TPE sampler (Ozaki et al. 2022), the others by mutation.

    A mutation changes one of the best recipes a little, as in LongRoPE's evolution (Ding et al. 2024, section 3.2):
    models of the whole space need more trials than most searches have. Everything is seeded by the search's seed and
    the trial's number, so that a trial which a kill cut short is drawn again as it was, and those after it as if
    nothing had happened.

    Args:
        seed: The search's.
        num_known: How many trials are given and not drawn.
    """

    def __init__(self, seed: int, num_known: int) -> None:
        self.seed, self.num_known = seed, num_known
        self._tpe = self._made(0)

    def _made(self, number: int) -> TPESampler:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            return TPESampler(
                n_startup_trials=self.num_known + _RANDOM_AT_FIRST,
                multivariate=True,
                group=True,
                constant_liar=True,
                seed=self._random(number).getrandbits(32),
            )

    def _random(self, number: int) -> random.Random:
        return random.Random(f"{self.seed} {number}")

    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        """Seed again."""
        self._tpe = self._made(trial.number)

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """The parameters that are drawn together."""
        parent = self._parent(study, trial.number)
        return parent.distributions if parent else self._tpe.infer_relative_search_space(study, trial)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Draw them."""
        parent = self._parent(study, trial.number)
        if parent is None:
            return self._tpe.sample_relative(study, trial, search_space)
        rng = self._random(trial.number)
        return {name: _mutated(rng, parent.params[name], space) for name, space in search_space.items()}

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """Draw a single parameter."""
        return self._tpe.sample_independent(study, trial, param_name, param_distribution)

    def after_trial(self, study: Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None) -> None:
        """Record the constraints of a trial."""
        self._tpe.after_trial(study, trial, state, values)

    def _parent(self, study: Study, number: int) -> FrozenTrial | None:
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
    """A value near another."""
    if isinstance(space, CategoricalDistribution):
        return rng.choice(space.choices) if rng.random() < _CHANCE else value
    step = rng.gauss(0.0, _SPREAD)
    if space.log:
        moved = math.exp(math.log(value) + step * math.log(space.high / space.low))
    else:
        moved = value + step * (space.high - space.low)
    moved = min(max(moved, space.low), space.high)
    return round(moved) if isinstance(space, IntDistribution) else moved
