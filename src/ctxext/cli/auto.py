"""`ctxext convert --method auto`: the recipe comes from a search with a small budget, or else from a comparison."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ctxext.cli.output import Output
from ctxext.errors import CtxextError, NothingMeasuredError
from ctxext.evaluate.loading import Loading
from ctxext.files.length import format_length
from ctxext.files.packages import is_installed
from ctxext.options import option, option_name
from ctxext.recipes.recipe import Recipe, recipe_from_dict

AUTO = "auto"
DEFAULT_MINUTES = 5.0
_FOR_SEARCH = 0.6
"""The share of the minutes that a search has; where it is too little, methods are compared in the rest."""
_NOT_BETTER = "No recipe is surely better than the model as it is: written is the best of the published ones, {}."
_LEAST = 0.1
"""Minutes that a comparison gets in any case."""
_PANEL = "Search of --method auto"


@dataclass(frozen=True)
class Budget:
    """How long a search for the recipe may take."""

    trials: int | None = option(None, help="Stop after so many recipes.", min=1, panel=_PANEL)
    minutes: float | None = option(
        None, help=f"About how long it may take. Default: {DEFAULT_MINUTES:g}, without --trials.", panel=_PANEL
    )


def wants_search(methods: Sequence[str], budget: Budget) -> bool:
    """Whether the recipe comes from a search."""
    if AUTO in methods and len(methods) > 1:
        raise CtxextError("--method auto searches for the whole recipe, so it stands alone.")
    if AUTO not in methods and budget != Budget():
        raise CtxextError("--trials and --minutes are for --method auto.")
    return AUTO in methods


def searched_recipe(
    source: str,
    given: Mapping[str, Any],
    budget: Budget,
    loading: Loading,
    out: Output,
    *,
    original_length: int | None = None,
) -> Recipe:
    """The best recipe of a search with a small budget of recipes and minutes, or else the best published method."""
    if set(given) != {"target_length"}:
        others = ", ".join(option_name(name) for name in given if name != "target_length")
        raise CtxextError(
            f"--method auto chooses {others} itself." if others else "--method auto needs to know how far to reach.",
            hint="Give it --target-length alone, for example 32k.",
        )
    from ctxext.cli.search import watching  # A conversion by a named method needs none of these.
    from ctxext.search.options import SearchOptions
    from ctxext.search.run import figures, search

    started = time.monotonic()
    minutes = DEFAULT_MINUTES if budget == Budget() else budget.minutes
    options = SearchOptions(
        target_length=given["target_length"],
        trials=budget.trials,
        minutes=minutes and _FOR_SEARCH * minutes,
        original_length=original_length,
    )
    if is_installed("optuna") or budget.trials is not None:
        try:
            with watching(out) as watch:
                result = search(source, options, loading=loading, watch=watch)
        except NothingMeasuredError as error:
            out.note(f"{error.message} Published methods are compared instead.")
        else:
            for line in figures(result.check):
                out.note(line)
            if result.recipe is not None:
                return result.recipe
            published = result.check.published
            if published is not None and published.trial.recipe is not None:
                out.note(_NOT_BETTER.format(published.trial.name))
                rise, half = result.check.answers[published.trial.number].rise(result.check.stock)
                if rise + half > options.keep_short:
                    cost = f"{100 * rise:+z.2f} ± {100 * half:.2f} %"
                    out.warning(
                        f"{published.trial.name} changes the loss at the original context length by {cost}, and no "
                        f"published method surely keeps the bound of {100 * options.keep_short:g} %."
                    )
                return published.trial.recipe
    left = None if minutes is None else max(_LEAST, minutes - (time.monotonic() - started) / 60)
    # The method that a comparison would take, or that comes nearest to being better.
    from ctxext.compare.run import compare

    with out.progress("comparing") as progress:
        report = compare(
            source,
            target_length=options.target_length,
            minutes=left,
            original_length=original_length,
            loading=loading,
            progress=progress,
            tell=out.note,
        )
    content = report["comparison"]
    best = content["taken"] or content["nearest"]
    if best is None:
        raise CtxextError(
            f"The time was too short to measure any method at {format_length(options.target_length)} tokens.",
            hint="Give more --minutes, or name a --method.",
        )
    out.note(content["verdict"])
    if content["taken"] is None:
        out.note(_NOT_BETTER.format(best))
    return recipe_from_dict(next(row["recipe"] for row in content["models"] if row["name"] == best), best)
