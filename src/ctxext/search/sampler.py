"""The sampler: optuna's, made to draw the same for the same place in a search, however often that was broken off."""

import random
import warnings
from collections.abc import Sequence
from typing import Any

from optuna import Study
from optuna.distributions import BaseDistribution
from optuna.exceptions import ExperimentalWarning
from optuna.samplers import BaseSampler, TPESampler
from optuna.trial import FrozenTrial, TrialState

_RANDOM_AT_FIRST = 10


class SteadySampler(BaseSampler):
    """A multi-objective TPE sampler (Ozaki et al. 2022) that is seeded anew for each trial.

    Its seed is the search's and the trial's number, so that a trial which a kill cut short is drawn again as it was,
    and those after it as if nothing had happened.

    Args:
        seed: The search's.
        num_known: How many trials are given and not drawn.
    """

    def __init__(self, seed: int, num_known: int) -> None:
        self.seed, self.num_known = seed, num_known
        self._own = self._made(0)

    def _made(self, number: int) -> TPESampler:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            return TPESampler(
                n_startup_trials=self.num_known + _RANDOM_AT_FIRST,
                multivariate=True,
                group=True,
                constant_liar=True,
                seed=random.Random(f"{self.seed} {number}").getrandbits(32),
            )

    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        """Seed anew."""
        self._own = self._made(trial.number)

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """Which parameters are drawn together."""
        return self._own.infer_relative_search_space(study, trial)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Draw those."""
        return self._own.sample_relative(study, trial, search_space)

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """Draw one that stands alone."""
        return self._own.sample_independent(study, trial, param_name, param_distribution)

    def after_trial(self, study: Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None) -> None:
        """Note how far a trial kept the constraints."""
        self._own.after_trial(study, trial, state, values)
