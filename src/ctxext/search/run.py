"""Search: load, measure the unmodified model, try recipes, evaluate the best on unseen prompts."""

import dataclasses
import math
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from ctxext.checkpoint.durations import Pace, format_duration
from ctxext.checkpoint.opening import Checkpoint
from ctxext.converters.plan import already_extended
from ctxext.errors import CtxextError, NothingMeasuredError
from ctxext.files.content import sha256_of
from ctxext.files.json_schema import RECIPE, schema_line
from ctxext.files.length import format_length
from ctxext.files.offline import forbid_network
from ctxext.files.output_directory import check_name, write_whole
from ctxext.files.packages import is_installed, require
from ctxext.models.checkpoint_info import CheckpointInfo, open_infos
from ctxext.notebook import table
from ctxext.options import accepts_options
from ctxext.recipes.model_config import model_config
from ctxext.recipes.recipe import Recipe
from ctxext.report.findings import format_count
from ctxext.search.options import SearchOptions, StudyPlace, default_study
from ctxext.search.space import build_space
from ctxext.version import __version__

if TYPE_CHECKING:
    from ctxext.models.model import LoadedModel, Loading
    from ctxext.report.pictures import TradeOff
    from ctxext.search.final_evaluation import Check
    from ctxext.search.measurement import Measurement
    from ctxext.search.study import Point, SearchState, Watch

_ENOUGH, _FEWEST = 12, 2
"""Recipes that should fit into the time, including the unmodified model and the final evaluation; and that must."""


@dataclass(frozen=True)
class SearchResult:
    """Result of a search.

    Attributes:
        recipe: The best recipe; None if no recipe significantly improves the model.
        state: All trials.
        check: Final evaluation on unseen prompts.
        files: The written files.
        open_thought: The mark of a thought within which prompts end; empty if there is none.
    """

    recipe: Recipe | None
    state: "SearchState"
    check: "Check"
    files: tuple[Path, ...]
    open_thought: str = ""

    def __repr__(self) -> str:
        return f"SearchResult({self._summary()})"

    def _repr_html_(self) -> str:
        return table({"recipe": self._summary(), "files": ", ".join(path.name for path in self.files) or "none"})

    def _summary(self) -> str:
        return "no recipe significantly improves the model" if self.recipe is None else self.recipe.summary()


@accepts_options(SearchOptions)
def search(
    source: str | Path,
    options: SearchOptions,
    *,
    out: str | Path | None = None,
    study: StudyPlace | None = None,
    resume: bool = False,
    overwrite: bool = False,
    loading: "Loading | None" = None,
    watch: "Watch | None" = None,
) -> SearchResult:
    """Find the recipe for a model by measuring recipes on it, without training.

    Args:
        source: A folder, a Hub id, or `demo`.
        options: Target length, bound on the loss, time limit and others. Each field is a keyword of this function
            too, as target_length="32k".
        out: The recipe file to write, with a picture of the Pareto front next to it if matplotlib is installed. None
            writes neither.
        study: The storage of the study; by default a file next to `out`, or none.
        resume: Continue the study; several processes may share it.
        overwrite: Replace an existing study and recipe file.
        loading: Options for loading the model.
        watch: Called with every new state of the search.

    Raises:
        CtxextError: The source, an option or a place is invalid; nothing is written.
    """
    started, began_at = time.monotonic(), time.time()
    require("optuna", "A search")
    source, out = str(source), None if out is None else Path(out)
    revision, token = (loading.revision, loading.token) if loading else (None, None)
    (info,) = open_infos([source], revision=revision, token=token, original_length=options.original_length)
    checkpoint = info.checkpoint
    space = build_space(checkpoint, options.target_length, options.methods)
    if model_config(checkpoint.config, checkpoint.original_length).is_extended:
        raise already_extended(checkpoint, space.rotary, can_replace=False)
    trained_length = space.rotary.trained_length
    options.list_lengths(trained_length)
    if out is not None:
        check_recipe_place(out, overwrite=overwrite or resume)
    place = study or (default_study(out) if out else None)
    replaces = place.check(resume=resume, overwrite=overwrite, began=began_at) if place else None

    # These modules import torch, which takes seconds.
    from ctxext.models.model import Loading, load_model
    from ctxext.models.recipe_applier import RecipeApplier
    from ctxext.search.final_evaluation import check, raise_without_points, rank_finalists
    from ctxext.search.measurement import make_eval_sets, measure
    from ctxext.search.study import WRITING, SearchState, TrialSetup, try_recipes

    def check_time(measurement: "Measurement") -> bool:
        if time.monotonic() > end:
            raise NothingMeasuredError(
                f"{options.seconds / 60:g} minutes were too short to measure the unmodified model.",
                hint="Raise --minutes, or measure less: --samples 4, shorter --lengths.",
            )
        return False

    watch = watch or (lambda state: None)
    end = started + options.seconds
    with tempfile.TemporaryDirectory() as folder:
        place = place or StudyPlace(path=Path(folder) / "study.db")
        watch(SearchState("loading the model", end=end))
        stock = load_model(info, loading or Loading())
        watch(SearchState("estimating the time", end=end))
        header = place.read_header() if replaces is None else None
        choices = list(options.list_smaller()) if header is None else [options.as_in_study(header)]
        options = _choose_options(info, stock, choices, trained_length, end)
        if options != choices[0]:
            lengths = ", ".join(map(format_length, options.list_lengths(trained_length)))
            stage = f"the time is enough for {format_count(options.samples, 'question')} per depth at {lengths} tokens"
            watch(SearchState(stage, end=end))
        trial_set, final_set, unseen = make_eval_sets(stock.encoder, options, trained_length)
        applier = RecipeApplier(stock, checkpoint, Path(folder) / Path(folder).name)
        watch(SearchState("measuring the unmodified model", end=end))
        began = time.monotonic()
        measurement = measure(stock, trial_set, check_time)
        seconds = time.monotonic() - began
        setup = TrialSetup(applier, options, trial_set, measurement, seconds, watch, end)
        state = try_recipes(
            setup, space, place, _make_header(checkpoint, info.digest, options, trained_length, stock), replaces
        )
        points = state.points
        if not points:
            raise_without_points(state.trials, options.seconds / 60)
        watch(dataclasses.replace(state, stage="measuring the best on more prompts"))
        halfway = (time.monotonic() + end - WRITING) / 2
        finalists = rank_finalists(applier, final_set, points, options.keep_short, halfway)
        watch(dataclasses.replace(state, stage="evaluating on unseen prompts"))
        checked = check(applier, unseen, points, finalists, options.keep_short, end - WRITING)
    found = _write_result(state, checked, out, checkpoint, options)
    return dataclasses.replace(found, open_thought=stock.encoder.open_thought)


def _choose_options(
    info: CheckpointInfo, stock: "LoadedModel", choices: Sequence[SearchOptions], trained_length: int, end: float
) -> SearchOptions:
    """Return the first options with time for some recipes, else the last, by an estimate from a first forward pass.

    Raises:
        NothingMeasuredError: The unmodified model and one recipe do not fit into the time.
    """
    if math.isinf(end):
        return choices[0]
    pace = Pace(info.checkpoint.config)
    pace.begin(stock.name, stock.first_pace(trained_length))

    def estimate(options: SearchOptions) -> float:
        texts = options.samples * (1 if stock.can_share else options.num_depths)
        documents = [trained_length] * options.num_documents
        read = [length for length in options.list_lengths(trained_length) for _ in range(texts)]
        return pace.estimate(stock.name, "", [*documents, *read])

    left = end - time.monotonic()
    chosen = next((choice for choice in choices if _ENOUGH * estimate(choice) <= left), choices[-1])
    if (least := _FEWEST * estimate(chosen)) <= left:
        return chosen
    less = "--samples 1" if chosen.samples > 1 else "a shorter --target-length"
    raise NothingMeasuredError(
        f"{chosen.seconds / 60:g} minutes are too short: the unmodified model and one recipe take "
        f"about {format_duration(least)}, and {format_duration(max(0.0, left))} are left after loading.",
        hint=f"Use --minutes {math.ceil((chosen.seconds - left + least) / 60)} or more, or {less}. "
        "ctxext compare fits its work to the time.",
    )


def _write_result(
    state: "SearchState", checked: "Check", out: Path | None, checkpoint: Checkpoint, options: SearchOptions
) -> SearchResult:
    """Write the files of the result, with its origin in the recipe, and return the result."""
    name, summary = checkpoint.public_name, f"{len(state.trials)} recipes tried, seed {options.seed}"
    recipe, files = None, []
    if checked.winner is not None and checked.winner.trial.recipe is not None and checked.is_better:
        note = f"Found by ctxext search on {name} for {options.target_length} tokens; {summary}."
        recipe = Recipe(checked.winner.trial.recipe.steps, note, f"ctxext search {__version__}")
    if out is not None and is_installed("matplotlib"):
        from ctxext.report.pictures import as_png, draw_pareto_front
        from ctxext.search.study import find_pareto_front

        title = f"{name} to {format_length(options.target_length)} tokens: {summary}"
        points, front = (list(map(_to_trade_off, each)) for each in (state.points, find_pareto_front(state.points)))
        best = _to_trade_off(checked.winner) if checked.winner else None
        files.append(out.with_suffix(".png"))
        write_whole(files[-1], as_png(draw_pareto_front(points, front, best, options.keep_short, title)))
    if out is not None and recipe is not None:
        files.append(out)
        comments = "".join(f"# {line}\n" for line in format_results(checked))
        text = yaml.safe_dump(recipe.to_dict(), sort_keys=False, allow_unicode=True, width=120)
        write_whole(out, f"{schema_line(RECIPE)}{comments}{text}".encode())
    elif out is not None:
        out.unlink(missing_ok=True)  # This search does not recommend the recipe that it was to replace.
    return SearchResult(recipe, state, checked, tuple(files))


def _to_trade_off(point: "Point") -> "TradeOff":
    """Return the values of a recipe that the picture shows."""
    from ctxext.report.pictures import TradeOff

    steps = point.trial.recipe.steps if point.trial.recipe else ()
    methods = " + ".join(step.name for step in steps)
    return TradeOff(methods, point.rise, point.loss, bool(point.trial.published))


def format_results(checked: "Check") -> list[str]:
    """Return the results of the final evaluation as lines."""
    count = checked.stock.num_prompts
    lines = [f"Measured on {count} unseen prompts per length:", _format_line("unmodified", checked.stock)]
    for number, answers in sorted(checked.answers.items(), key=lambda entry: entry[1].loss):
        point, (rise, half) = checked.points[number], answers.rise(checked.stock)
        words = ["found"] if point is checked.winner else []
        words += ["published"] if point.trial.published else []
        words += ["may break the bound" if rise <= checked.keep_short else "breaks the bound"] * (
            rise + half > checked.keep_short
        )
        name = point.trial.name + (f" ({', '.join(words)})" if words else "")
        lines.append(_format_line(name, answers) + f"; original context length {100 * rise:+z.2f} ± {100 * half:.2f} %")
    return lines


def _format_line(name: str, answers: "Measurement") -> str:
    shares = ", ".join(f"{100 * answers.exact(length):.1f} % at {length}" for length in answers.lengths)
    return f"  {name}: loss of an answer {answers.loss:.4f}, needles {shares}"


def _make_header(
    checkpoint: Checkpoint, digest: str, options: SearchOptions, trained_length: int, stock: "LoadedModel"
) -> dict[str, Any]:
    import torch
    import transformers

    with forbid_network():
        import optuna
    data = options.data
    if data is not None and Path(data).is_file():
        data = sha256_of(Path(data))
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "optuna": optuna.__version__}
    return {
        "source": checkpoint.public_name,
        "digest": digest,
        **options.get_study_options(trained_length),
        "data": data,
        "ctxext": __version__,
        **versions,
        **stock.facts(),
    }


def check_recipe_place(out: Path, *, overwrite: bool) -> None:
    """Raise if the recipe file cannot be written."""
    check_name(out)
    folder = out.resolve().parent
    if out.is_dir():
        raise CtxextError(f'"{out}" is a folder, not a recipe file.', hint=f"Use a file, for example {out}/best.yaml")
    if out.exists() and not overwrite:
        raise CtxextError(f'The file "{out}" exists already.', hint="Replace it with --overwrite, or choose another.")
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise CtxextError(f'"{folder}" does not exist or is not writable.', hint="Choose another folder.")
