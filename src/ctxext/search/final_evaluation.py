"""Final evaluation: measure the best recipes on more prompts, then choose among the best on unseen prompts."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ctxext.errors import NothingMeasuredError
from ctxext.models.model import LoadedModel
from ctxext.models.recipe_applier import RecipeApplier
from ctxext.search.measurement import EvalSet, Measurement, measure
from ctxext.search.study import Point, Trial, choose_finalists

_STOCK = -1
"""Key of the unmodified model among the trial numbers."""


@dataclass(frozen=True)
class Check:
    """The final evaluation, on prompts that were not used before.

    Attributes:
        winner: The best recipe within the bound at the original context length; None if there is none.
        published: The best published recipe, preferably within the bound.
        stock: Measurement of the unmodified model.
        points: Measured recipes, by trial number.
        answers: Their measurements.
        keep_short: The bound.
    """

    winner: Point | None
    published: Point | None
    stock: Measurement
    points: Mapping[int, Point] = field(default_factory=dict)
    answers: Mapping[int, Measurement] = field(default_factory=dict)
    keep_short: float = 0.0

    @property
    def winner_answers(self) -> Measurement | None:
        """Measurement of the winner."""
        return self.answers[self.winner.trial.number] if self.winner else None

    @property
    def gain(self) -> tuple[float, float]:
        """Decrease of the bounded loss per answer with the winner, and half its 95 % interval."""
        return self.winner_answers.gain(self.stock) if self.winner_answers else (0.0, 0.0)

    @property
    def rise(self) -> tuple[float, float]:
        """Relative rise of the winner's loss at the original context length, and half its 95 % interval."""
        return self.winner_answers.rise(self.stock) if self.winner_answers else (0.0, 0.0)

    @property
    def is_better(self) -> bool:
        """Whether the winner stays within the loss bound, answers more prompts, and has a significantly lower loss."""
        return (
            self.winner_answers is not None
            and keeps_bound(self.winner_answers, self.stock, self.keep_short)
            and self.gain[0] > self.gain[1]
            and self.winner_answers.share > self.stock.share
        )

    @property
    def finds_more(self) -> Point | None:
        """Recipe that answers the most prompts, if it answers more than the winner."""
        least = self.winner_answers.share if self.winner_answers else self.stock.share
        best = max(self.points.values(), key=lambda point: self.answers[point.trial.number].share, default=None)
        return best if best and self.answers[best.trial.number].share > least else None


def keeps_bound(answers: Measurement, stock: Measurement, keep_short: float) -> bool:
    """Return whether the upper end of the rise of the loss at the original context length is within the bound."""
    return sum(answers.rise(stock)) <= keep_short


def rank_finalists(
    applier: RecipeApplier, eval_set: EvalSet, points: Sequence[Point], keep_short: float, end: float
) -> list[Point]:
    """Measure the finalists on a larger eval set and return those that keep the bound, lowest loss first.

    The search has few prompts and many recipes, so its best result is partly due to luck. A recipe keeps the bound if
    the upper end of its 95 % interval does. Recipes that are significantly worse are not measured further. `end` is on
    the monotonic clock in seconds.
    """

    def has_lost(key: int, measurements: Mapping[int, Measurement]) -> bool:
        stock = measurements[_STOCK]
        rise, half = measurements[key].rise(stock)
        if rise - half > keep_short:
            return True
        rivals = [entry for number, entry in measurements.items() if number != _STOCK]
        rivals = [entry for entry in rivals if keeps_bound(entry, stock, keep_short)]
        gain, spread = measurements[key].gain(min(rivals, key=lambda entry: entry.loss)) if rivals else (0.0, 0.0)
        return gain + spread < 0

    finalists = {point.trial.number: point for point in choose_finalists(points, keep_short)}
    measurements = _measure_models(applier, eval_set, [point.trial for point in finalists.values()], end, has_lost)
    stock = measurements[_STOCK]
    numbers = [
        number
        for number in finalists
        if number in measurements and keeps_bound(measurements[number], stock, keep_short)
    ]
    return [finalists[number] for number in sorted(numbers, key=lambda number: (measurements[number].loss, number))]


def check(
    applier: RecipeApplier,
    eval_set: EvalSet,
    points: Sequence[Point],
    finalists: Sequence[Point],
    keep_short: float,
    end: float,
) -> Check:
    """Measure the unmodified model and the candidates on unseen prompts, and choose the best that keeps the bound.

    Candidates are the finalists that keep the bound, the best published recipe, and the one that answered the most
    prompts. Unseen documents exclude recipes that kept the bound by luck. `end` is on the monotonic clock in
    seconds.
    """
    published = min((point for point in points if point.trial.published), key=lambda point: point.loss, default=None)
    shares = {point.trial.number: point.trial.measurement.share for point in points if point.trial.measurement}
    most = max(points, key=lambda point: (shares.get(point.trial.number, 0.0), -point.loss), default=None)
    chosen = {point.trial.number: point for point in (*finalists, published, most) if point is not None}
    measurements = _measure_models(applier, eval_set, [point.trial for point in chosen.values()], end)
    stock = measurements.pop(_STOCK)

    def rank(number: int) -> tuple[bool, float, int]:
        measurement = measurements[number]
        keeps = chosen[number].rise <= keep_short and keeps_bound(measurement, stock, keep_short)
        return not keeps, measurement.loss, number

    ranked = sorted(measurements, key=rank)
    winner = next((chosen[number] for number in ranked if not rank(number)[0]), None)
    best_published = next((chosen[number] for number in ranked if chosen[number].trial.published), None)
    return Check(winner, best_published, stock, chosen, measurements, keep_short)


def _measure_models(
    applier: RecipeApplier,
    eval_set: EvalSet,
    trials: Sequence[Trial],
    end: float,
    has_lost: Callable[[int, Mapping[int, Measurement]], bool] = lambda key, measurements: False,
) -> dict[int, Measurement]:
    """Measure all models on as many parts of an eval set as time allows, at least one.

    All models are measured on the same prompts, so that they are comparable whenever the time is up. Those that have
    lost are dropped, also from the result.
    """
    models: dict[int, LoadedModel] = {_STOCK: applier.stock}
    for trial in trials:
        assert trial.recipe is not None, "only measured recipes are points"
        models[trial.number] = applier.apply(trial.recipe)
    measurements: dict[int, Measurement] = {}
    seconds = 0.0
    for part in eval_set.parts():
        began = time.monotonic()
        if measurements and began + seconds > end:
            break
        for key, model in models.items():
            partial = measure(model, part)
            measurements[key] = measurements[key] + partial if key in measurements else partial
        seconds = time.monotonic() - began
        for key in [key for key in models if key != _STOCK and has_lost(key, measurements)]:
            del models[key], measurements[key]
    return measurements


def raise_without_points(trials: Sequence[Trial], minutes: float) -> None:
    """Raise the reason why no recipe was measured."""
    reasons = [trial.refusal for trial in trials if trial.refusal]
    if not reasons and math.isfinite(minutes):
        raise NothingMeasuredError(
            f"{minutes:g} minutes were too short to measure a recipe.",
            hint="Raise --minutes, or measure less: --samples 4, shorter --lengths. --resume keeps the tried recipes.",
        )
    raise NothingMeasuredError(
        "No recipe could be measured on this model" + (f": {reasons[0]}" if reasons else "."),
        hint="Try other --methods, or more --trials.",
    )
