"""A whole search: load, measure the unmodified model, try recipes, check the best on unused prompts."""

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

from ctxext.checkpoint.opening import Checkpoint
from ctxext.converters.plan import already_extended
from ctxext.errors import CtxextError, NothingMeasuredError
from ctxext.evaluate.checkpoint_info import CheckpointInfo, open_infos
from ctxext.files.content import sha256_of
from ctxext.files.length import format_length
from ctxext.files.output_directory import write_whole
from ctxext.files.packages import is_installed, require
from ctxext.notebook import table
from ctxext.options import accepts_options
from ctxext.recipes.encodings.rotary import model_config
from ctxext.recipes.recipe import Recipe
from ctxext.search.options import DEFAULT_MINUTES, SearchOptions, StudyPlace, study_beside
from ctxext.search.space import space_of
from ctxext.version import __version__

if TYPE_CHECKING:
    from ctxext.evaluate.model import LoadedModel, Loading
    from ctxext.search.final_evaluation import Check
    from ctxext.search.measurement import EvalSet, Measurement
    from ctxext.search.study import Point, Standing, Watch


@dataclass(frozen=True)
class Found:
    """The result of a search.

    Attributes:
        recipe: The best recipe; None if no recipe significantly improves the model.
        standing: All trials.
        check: The measurements of the best one and others on prompts that the search never used.
        files: The files written.
    """

    recipe: Recipe | None
    standing: "Standing"
    check: "Check"
    files: tuple[Path, ...]

    def __repr__(self) -> str:
        return f"Found({self._words()})"

    def _repr_html_(self) -> str:
        return table({"recipe": self._words(), "files": ", ".join(path.name for path in self.files) or "none"})

    def _words(self) -> str:
        return "no recipe surely improves the model" if self.recipe is None else self.recipe.summary()


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
) -> Found:
    """Find the recipe for a model by measuring recipes on it, without training.

    Args:
        source: A folder, a Hub id, or `demo`.
        options: The target length, the bound on the loss and the time limit, among others. Each field is a keyword of
            this function too, as target_length="32k".
        out: The recipe file to write; beside it a picture of the Pareto front, if matplotlib is installed. None writes
            neither.
        study: The storage of the study; None keeps it beside `out`, or nowhere without that.
        resume: Continue the study; several processes may share one.
        overwrite: Replace an existing study and recipe file.
        loading: How to load the model.
        watch: Called with every new state of the search.

    Raises:
        CtxextError: the source, an option or a place is refused; nothing is written then.
    """
    started = time.monotonic()
    require("optuna", "A search")
    source, out = str(source), None if out is None else Path(out)
    revision, token = (loading.revision, loading.token) if loading else (None, None)
    (info,) = open_infos([source], revision=revision, token=token, original_length=options.original_length)
    checkpoint = info.checkpoint
    space = space_of(checkpoint, options.target_length, options.methods)
    if model_config(checkpoint.config, checkpoint.original_length).is_extended:
        raise already_extended(checkpoint, space.rotary)
    trained_length = space.rotary.trained_length
    options.lengths_from(trained_length)
    if out is not None:
        check_recipe_place(out, overwrite=overwrite or resume)

    # The rest needs torch, which takes seconds to import.
    from ctxext.evaluate.model import Loading, load_model
    from ctxext.evaluate.workbench import Workbench
    from ctxext.search.final_evaluation import check, refuse_without_points, run_off
    from ctxext.search.gradient import learned_standing
    from ctxext.search.measurement import make_eval_sets, measure
    from ctxext.search.study import WRITING, Ground, Standing, try_recipes

    def in_time(measurement: "Measurement") -> bool:
        if time.monotonic() > end:
            raise NothingMeasuredError(
                f"{options.minutes:g} minutes were too short to ask even the plain model.",
                hint="Give more --minutes, or ask less: --samples 4, shorter --lengths.",
            )
        return False

    watch = watch or (lambda standing: None)
    end = started + options.seconds
    with tempfile.TemporaryDirectory() as folder:
        beside = study_beside(out) if out and not options.gradient else None
        place = study or beside or StudyPlace(path=Path(folder) / "study.db")
        place.check(resume=resume, overwrite=overwrite)
        watch(Standing("loading the model", end=end))
        stock = load_model(info, loading or Loading())
        trial_set, final_set, unseen = make_eval_sets(stock.encoder, options, trained_length)
        bench = Workbench(stock, checkpoint, Path(folder) / Path(folder).name)
        if not resume:
            place.clear()
        watch(Standing("estimating the time", end=end))
        _check_time(info, stock, trial_set, options, end)
        watch(Standing("asking the plain model", end=end))
        began = time.monotonic()
        asked = measure(stock, trial_set, in_time)
        seconds = time.monotonic() - began
        ground = Ground(bench, options, trial_set, asked, seconds, watch, end)
        if options.gradient:
            standing = learned_standing(ground)
        else:
            standing = try_recipes(
                ground, space, place, _header(checkpoint, info.digest, options, trained_length, stock)
            )
        points = standing.points
        if not points:
            refuse_without_points(standing.trials, options.minutes)
        watch(dataclasses.replace(standing, stage="asking the best once more"))
        halfway = (time.monotonic() + end - WRITING) / 2
        kept = run_off(bench, final_set, points, options.keep_short, halfway)
        watch(dataclasses.replace(standing, stage="checking on unseen prompts"))
        checked = check(bench, unseen, points, kept, options.keep_short, end - WRITING)
    return _written(standing, checked, out, checkpoint, options)


def _check_time(
    info: CheckpointInfo, stock: "LoadedModel", trial_set: "EvalSet", options: SearchOptions, end: float
) -> None:
    """Raise if the time is too short, by an estimate from some tokens that the model reads first.

    Raises:
        NothingMeasuredError: The plain model and one recipe do not fit into the time.
    """
    if math.isinf(end):
        return
    from ctxext.evaluate.run import cost_of, format_duration

    documents, length = trial_set.documents.shape
    texts = trial_set.num_questions * (1 if stock.can_share else trial_set.num_depths)
    cost = cost_of(info.checkpoint.config)
    tokens, seconds = stock.first_pace(length)
    read = [*[length] * documents, *(length for length in trial_set.lengths for _ in range(texts))]
    each, left = seconds / cost(tokens) * sum(map(cost, read)), end - time.monotonic()
    if 2 * each > left:
        raise NothingMeasuredError(
            f"{options.minutes or DEFAULT_MINUTES:g} minutes were too short: the plain model and one recipe take about "
            f"{format_duration(2 * each)}, and {format_duration(max(0.0, left))} are left after loading.",
            hint="Give more --minutes, or ask less: --samples 4, shorter --lengths.",
        )


def _written(
    standing: "Standing", checked: "Check", out: Path | None, checkpoint: Checkpoint, options: SearchOptions
) -> Found:
    """Write the files of the result, with its origin noted in the recipe, and return the result."""
    name, tried = checkpoint.public_name, f"{len(standing.trials)} recipes tried, seed {options.seed}"
    recipe, files = None, []
    if checked.winner is not None and checked.winner.trial.recipe is not None and checked.is_better:
        note = f"Found by ctxext search on {name} for {options.target_length} tokens; {tried}."
        recipe = Recipe(checked.winner.trial.recipe.steps, note, f"ctxext search {__version__}")
    if out is not None and is_installed("matplotlib"):
        title = f"{name} to {format_length(options.target_length)} tokens: {tried}"
        files.append(out.with_suffix(".png"))
        write_whole(files[-1], pareto_picture(standing.points, checked.winner, options.keep_short, title))
    if out is not None and recipe is not None:
        files.append(out)
        comments = "".join(f"# {line}\n" for line in figures(checked))
        text = yaml.safe_dump(recipe.to_dict(), sort_keys=False, allow_unicode=True, width=120)
        write_whole(out, f"{comments}{text}".encode())
    elif out is not None:
        out.unlink(missing_ok=True)  # An existing file was to be replaced, and this search would not recommend it.
    return Found(recipe, standing, checked, tuple(files))


_INK, _FAINT = "#222222", "#d5d5d5"
_MARKERS = "osDv^P*X"


def pareto_picture(points: "Sequence[Point]", best: "Point | None", keep_short: float, title: str) -> bytes:
    """Draw a PNG with the rise at the original context length across and the loss of the answers upwards."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import StrMethodFormatter

    from ctxext.evaluate.report.colours import SERIES
    from ctxext.evaluate.report.pictures import as_png
    from ctxext.search.study import pareto_front

    figure = Figure(figsize=(7.2, 4.4), layout="constrained")
    axes = figure.subplots()
    groups: dict[str, list[Point]] = {}
    for point in points:
        assert point.trial.recipe is not None
        groups.setdefault(" + ".join(step.name for step in point.trial.recipe.steps), []).append(point)
    for number, (name, members) in enumerate(sorted(groups.items(), key=lambda group: (-len(group[1]), group[0]))):
        axes.scatter(
            [100 * point.rise for point in members],
            [point.loss for point in members],
            s=[46 if point.trial.published else 20 for point in members],
            color=SERIES[number % len(SERIES)],
            marker=_MARKERS[number // len(SERIES) % len(_MARKERS)],
            linewidths=0.8,
            edgecolors=[_INK if point.trial.published else "none" for point in members],
            label=name,
            zorder=3,
        )
    front = sorted(pareto_front(points), key=lambda point: point.rise)
    line = {"color": _INK, "linewidth": 1.0, "zorder": 2}
    axes.step([100 * point.rise for point in front], [point.loss for point in front], where="post", **line)
    axes.axvline(100 * keep_short, color=_INK, linewidth=0.9, linestyle=":")
    if best is not None:
        axes.scatter(
            [100 * best.rise], [best.loss], s=190, facecolors="none", edgecolors=_INK, linewidths=1.4, zorder=4
        )
    if all(point.loss > 0 for point in points):
        axes.set_yscale("log")
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.set_xlabel("rise of the loss at the original context length, in percent")
    axes.set_ylabel("loss of the answers, from 0 to 1")
    axes.set_title(title, fontsize=10, fontweight="bold")
    axes.grid(color=_FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if points:
        note = "outlined: published numbers\nring: taken\ndotted: what may be lost"
        axes.legend(
            fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5), title=note, title_fontsize=7
        )
    return as_png(figure)


def figures(checked: "Check") -> list[str]:
    """Return the figures of the last check, in lines."""
    count = checked.stock.num_prompts
    lines = [f"Measured on {count} prompts of each length that the search never saw:", _line("stock", checked.stock)]
    for number, answers in sorted(checked.answers.items(), key=lambda entry: entry[1].loss):
        point, (rise, half) = checked.points[number], answers.rise(checked.stock)
        words = ["found"] if point is checked.winner else []
        words += ["published"] if point.trial.published else []
        words += ["may break the bound" if rise <= checked.keep_short else "breaks the bound"] * (
            rise + half > checked.keep_short
        )
        name = point.trial.name + (f" ({', '.join(words)})" if words else "")
        lines.append(_line(name, answers) + f"; original context length {100 * rise:+z.2f} ± {100 * half:.2f} %")
    return lines


def _line(name: str, answers: "Measurement") -> str:
    shares = ", ".join(f"{100 * answers.exact(length):.1f} % at {length}" for length in answers.lengths)
    return f"  {name}: loss of an answer {answers.loss:.4f}, needles {shares}"


def _header(
    checkpoint: Checkpoint, digest: str, options: SearchOptions, trained_length: int, stock: "LoadedModel"
) -> dict[str, Any]:
    import optuna
    import torch
    import transformers

    data = options.data
    if data is not None and Path(data).is_file():
        data = sha256_of(Path(data))
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "optuna": optuna.__version__}
    return {
        "source": checkpoint.public_name,
        "digest": digest,
        **options.what_is_asked(trained_length),
        "data": data,
        "ctxext": __version__,
        **versions,
        **stock.facts(),
    }


def check_recipe_place(out: Path, *, overwrite: bool) -> None:
    """Check that the recipe file can be written."""
    folder = out.resolve().parent
    if out.is_dir():
        raise CtxextError(f'"{out}" is a folder, not a place for a recipe file.', hint=f"Name a file: {out}/best.yaml")
    if out.exists() and not overwrite:
        raise CtxextError(f'There is a file "{out}" already.', hint="Replace it with --overwrite, or choose another.")
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise CtxextError(f'"{folder}" is not there or cannot be written to.', hint="Choose another place.")
