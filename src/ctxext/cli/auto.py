"""`ctxext convert --method auto`: a search with a small budget replaces the recipe."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from ctxext.cli.output import Output
from ctxext.cli.search import verdict
from ctxext.cli.search_view import watching
from ctxext.errors import CtxextError
from ctxext.reading.length import parse_length
from ctxext.recipes.recipe import Recipe
from ctxext.search.options import SearchOptions
from ctxext.search.run import figures, search

AUTO = "auto"
DEFAULT_MINUTES = 5.0
_PANEL = "Search of --method auto"

TrialsOption = Annotated[
    int | None, typer.Option("--trials", min=1, help="Stop after so many recipes.", rich_help_panel=_PANEL)
]
MinutesOption = Annotated[
    float | None,
    typer.Option(
        "--minutes",
        help=f"About how long it may take. Default: {DEFAULT_MINUTES:g}, without --trials.",
        rich_help_panel=_PANEL,
    ),
]


def wants_search(methods: Sequence[str], trials: int | None, minutes: float | None) -> bool:
    """Whether the recipe comes from a search.

    Raises:
        CtxextError: it is both to be searched and named, or a budget is given for no search.
    """
    if AUTO in methods and len(methods) > 1:
        raise CtxextError("--method auto searches for the whole recipe, so it stands alone.")
    if AUTO not in methods and (trials, minutes) != (None, None):
        raise CtxextError("--trials and --minutes are for --method auto.")
    return AUTO in methods


def searched_recipe(
    source: str,
    given: Mapping[str, Any],
    budget: tuple[int | None, float | None],
    hub: Mapping[str, Any],
    out: Output,
    *,
    original_length: int | None = None,
) -> Recipe:
    """The best recipe of a search with a small budget.

    Args:
        source: The checkpoint.
        given: Method options that were given; only a target length makes sense.
        budget: How many recipes, how many minutes.
        hub: How to load the model: device, dtype, revision, token.
        out: Where to show how it goes.
        original_length: What the model was trained on, in tokens, where its files do not say it.

    Raises:
        CtxextError: the options do not go with a search, or no recipe makes the model better.
    """
    if set(given) != {"target_length"}:
        others = ", ".join("--" + name.replace("_", "-") for name in given if name != "target_length")
        raise CtxextError(
            f"--method auto chooses {others} itself." if others else "--method auto needs to know how far to reach.",
            hint="Give it --target-length alone, for example 32k.",
        )
    from ctxext.evaluate.model import Loading

    trials, minutes = budget
    minutes = DEFAULT_MINUTES if trials is None and minutes is None else minutes
    options = SearchOptions(
        target_length=parse_length(given["target_length"]),
        trials=trials,
        minutes=minutes,
        original_length=original_length,
    )
    with watching(out) as watch:
        result = search(source, options, loading=Loading(**hub), watch=watch)
    if result.recipe is None:
        raise CtxextError(verdict(result, options), hint="Nothing was converted.")
    for line in figures(result.check):
        out.note(line)
    return result.recipe
