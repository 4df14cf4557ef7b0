"""The best recipes once more, on many prompts that they were not chosen by; then the winner on prompts nobody saw."""

from dataclasses import dataclass

from ctxext.errors import CtxextError
from ctxext.search.eval_set import EvalSet
from ctxext.search.loop import Standing
from ctxext.search.measurement import Measurement, measure
from ctxext.search.options import SearchOptions
from ctxext.search.pareto import Point
from ctxext.search.trial_model import Workbench

_FINALISTS = 5


@dataclass(frozen=True)
class Check:
    """Answers to prompts that were used for nothing else.

    Attributes:
        winner: The best recipe; None where none keeps the bound at the original context length.
        published: The best of the published ones, whatever it loses at the original context length.
        answers: Of `stock`, `published` and `found`, as far as there are these.
        gain: By how much the winner lowers the bounded loss of an answer, and half its 95 % interval.
        rise: By which share it raises the loss of documents at the original context length, and half its interval.
    """

    winner: Point | None
    published: Point | None
    answers: dict[str, Measurement]
    gain: tuple[float, float] = (0.0, 0.0)
    rise: tuple[float, float] = (0.0, 0.0)

    @property
    def is_better(self) -> bool:
        """Whether the winner finds more, and its loss is lower by more than chance would give.

        Nothing less is a reason to change a model.
        """
        return self.gain[0] - self.gain[1] > 0 and self.answers["found"].share > self.answers["stock"].share


def run_off(bench: Workbench, eval_set: EvalSet, standing: Standing, options: SearchOptions) -> Point | None:
    """The recipe with the lowest loss on a larger eval set, of the best of the search and of the published ones.

    The search's own prompts are few and its recipes many, so that its best is partly a lucky one. Only recipes count
    that keep the loss at the original context length by the upper end of the 95 % interval.
    """
    kept = sorted(
        (point for point in standing.points if point.rise <= options.keep_short),
        key=lambda point: (point.loss, point.trial.number),
    )
    finalists = [point for place, point in enumerate(kept) if place < _FINALISTS or point.trial.published]
    stock = measure(bench.stock, eval_set)
    best, least = None, float("inf")
    for point in finalists:
        found = _asked(bench, eval_set, point, stock, least, options)
        if found.is_whole and found.loss < least:
            best, least = point, found.loss
    return best


def _asked(
    bench: Workbench, eval_set: EvalSet, point: Point, stock: Measurement, least: float, options: SearchOptions
) -> Measurement:
    """A finalist's answers, as long as it keeps the bound at the original context length and can still win."""

    def has_lost(found: Measurement) -> bool:
        rise, half = found.rise(stock)
        return rise + half > options.keep_short or found.least_loss >= least

    assert point.trial.recipe is not None, "only measured recipes are points"
    return measure(bench.apply(point.trial.recipe), eval_set, has_lost)


def check(bench: Workbench, eval_set: EvalSet, standing: Standing, winner: Point | None) -> Check:
    """Ask the plain model, the best published recipe and the winner what nobody was asked before.

    Raises:
        CtxextError: no recipe at all could be measured.
    """
    if not standing.points:
        reasons = [one.refusal for one in standing.trials if one.refusal]
        raise CtxextError(
            "No recipe could be measured on this model" + (f": {reasons[0]}" if reasons else "."),
            hint="Try others with --methods, or more --trials.",
        )
    published = min(
        (point for point in standing.points if point.trial.published), key=lambda point: point.loss, default=None
    )
    answers = {"stock": measure(bench.stock, eval_set)}
    for name, point in (("published", published), ("found", winner)):
        if point is not None and point.trial.recipe is not None:
            answers[name] = measure(bench.apply(point.trial.recipe), eval_set)
    if winner is None:
        return Check(None, published, answers)
    found, stock = answers["found"], answers["stock"]
    return Check(winner, published, answers, found.gain(stock), found.rise(stock))
