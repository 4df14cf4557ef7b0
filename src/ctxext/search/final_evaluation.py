"""Measure the best recipes again on many new prompts, then choose among the best of them on unseen prompts."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ctxext.errors import NothingMeasuredError
from ctxext.evaluate.model import LoadedModel
from ctxext.evaluate.workbench import Workbench
from ctxext.search.measurement import EvalSet, Measurement, measure
from ctxext.search.study import Point, Trial, choose_finalists

_STOCK = -1
"""Key of the unmodified model among the numbers of trials."""


@dataclass(frozen=True)
class Check:
    """The last check: answers to prompts that were used for nothing else.

    Attributes:
        winner: The best recipe on these prompts; None if none surely keeps the bound at the original context length.
        published: The best published one: of those that keep the bound if any does.
        stock: The plain model's answers.
        points: Every recipe that was measured, by its trial's number.
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
        """The winner's answers."""
        return self.answers[self.winner.trial.number] if self.winner else None

    @property
    def gain(self) -> tuple[float, float]:
        """The decrease of the winner's bounded loss of an answer, and half its 95 % interval."""
        return self.winner_answers.gain(self.stock) if self.winner_answers else (0.0, 0.0)

    @property
    def rise(self) -> tuple[float, float]:
        """The relative rise of its loss on documents at the original context length, and half its interval."""
        return self.winner_answers.rise(self.stock) if self.winner_answers else (0.0, 0.0)

    @property
    def is_better(self) -> bool:
        """Whether the winner keeps the bound, answers more prompts, and has a significantly lower loss.

        Nothing less is a reason to change a model.
        """
        return (
            self.winner_answers is not None
            and keeps_bound(self.winner_answers, self.stock, self.keep_short)
            and self.gain[0] > self.gain[1]
            and self.winner_answers.share > self.stock.share
        )

    @property
    def finds_more(self) -> Point | None:
        """The recipe that answers the most prompts, if it answers more than the winner."""
        least = self.winner_answers.share if self.winner_answers else self.stock.share
        best = max(self.points.values(), key=lambda point: self.answers[point.trial.number].share, default=None)
        return best if best and self.answers[best.trial.number].share > least else None


def keeps_bound(answers: Measurement, stock: Measurement, keep_short: float) -> bool:
    """Return whether the loss at the original context length keeps the bound, by its interval's upper end."""
    return sum(answers.rise(stock)) <= keep_short


def rank_finalists(
    bench: Workbench, eval_set: EvalSet, points: Sequence[Point], keep_short: float, end: float
) -> list[Point]:
    """Return those that keep the bound on a larger eval set, of the best of the search and of the published ones.

    The search has few prompts and many recipes, so its best is partly due to luck. Only recipes count that keep the
    loss at the original context length by the upper end of the 95 % interval. Recipes that have surely lost are not
    measured further. The lowest loss comes first; `end` is on the monotonic clock in seconds.
    """

    def has_lost(key: int, measurements: Mapping[int, Measurement]) -> bool:
        stock = measurements[_STOCK]
        rise, half = measurements[key].rise(stock)
        if rise - half > keep_short:
            return True
        kept = [one for other, one in measurements.items() if other != _STOCK and keeps_bound(one, stock, keep_short)]
        gain, spread = measurements[key].gain(min(kept, key=lambda one: one.loss)) if kept else (0.0, 0.0)
        return gain + spread < 0

    finalists = {point.trial.number: point for point in choose_finalists(points, keep_short)}
    measurements = _measure_models(bench, eval_set, [point.trial for point in finalists.values()], end, has_lost)
    stock = measurements[_STOCK]
    kept = [
        number
        for number in finalists
        if number in measurements and keeps_bound(measurements[number], stock, keep_short)
    ]
    return [finalists[number] for number in sorted(kept, key=lambda number: (measurements[number].loss, number))]


def check(
    bench: Workbench,
    eval_set: EvalSet,
    points: Sequence[Point],
    kept: Sequence[Point],
    keep_short: float,
    end: float,
) -> Check:
    """Measure the plain model and the recipes of interest on unseen prompts, and choose the best that keeps the bound.

    These are all that kept the bound so far, the best published recipe, and the one that answered the most prompts,
    whatever they lose. A recipe that kept the bound by luck so far does not keep it on unseen documents. `end` is on
    the monotonic clock in seconds.
    """
    published = min((point for point in points if point.trial.published), key=lambda point: point.loss, default=None)
    shares = {point.trial.number: point.trial.measurement.share for point in points if point.trial.measurement}
    most = max(points, key=lambda point: (shares.get(point.trial.number, 0.0), -point.loss), default=None)
    wanted = {point.trial.number: point for point in (*kept, published, most) if point is not None}
    measurements = _measure_models(bench, eval_set, [point.trial for point in wanted.values()], end)
    stock = measurements.pop(_STOCK)

    def rank(number: int) -> tuple[bool, float, int]:
        mine = measurements[number]
        keeps = wanted[number].rise <= keep_short and keeps_bound(mine, stock, keep_short)
        return not keeps, mine.loss, number

    ranked = sorted(measurements, key=rank)
    winner = next((wanted[number] for number in ranked if not rank(number)[0]), None)
    best_published = next((wanted[number] for number in ranked if wanted[number].trial.published), None)
    return Check(winner, best_published, stock, wanted, measurements, keep_short)


def _measure_models(
    bench: Workbench,
    eval_set: EvalSet,
    trials: Sequence[Trial],
    end: float,
    has_lost: Callable[[int, Mapping[int, Measurement]], bool] = lambda key, measurements: False,
) -> dict[int, Measurement]:
    """Measure all models on as many parts of an eval set as time allows, at least one.

    All models are measured on the same prompts, so that they can be compared whenever the time is up. Those that have
    lost are left out of the rest, and of the result.
    """
    models: dict[int, LoadedModel] = {_STOCK: bench.stock}
    for trial in trials:
        assert trial.recipe is not None, "only measured recipes are points"
        models[trial.number] = bench.apply(trial.recipe)
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


def refuse_without_points(trials: Sequence[Trial], minutes: float | None) -> None:
    """Refuse a search that measured no recipe, with the reason."""
    reasons = [one.refusal for one in trials if one.refusal]
    if not reasons and minutes is not None:
        raise NothingMeasuredError(
            f"{minutes:g} minutes were too short to measure a recipe.",
            hint="Give more --minutes, or ask less: --samples 4, shorter --lengths. --resume keeps what was tried.",
        )
    raise NothingMeasuredError(
        "No recipe could be measured on this model" + (f": {reasons[0]}" if reasons else "."),
        hint="Try others with --methods, or more --trials.",
    )
