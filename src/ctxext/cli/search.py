"""`ctxext search`: search for the best recipe for a model."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ctxext.checkpoint.durations import format_duration
from ctxext.cli.eval import warn_of_thoughts
from ctxext.cli.interrupts import exit_on_interrupt
from ctxext.cli.options import SourceArgument, takes_options
from ctxext.cli.output import Output, done_line, resuming_command
from ctxext.files.packages import install_command, is_installed
from ctxext.models.loading import Loading
from ctxext.options import option
from ctxext.search.options import SearchOptions, StudyPlace, default_study, redact_storage
from ctxext.search.run import SearchResult, format_results, search

if TYPE_CHECKING:
    from ctxext.search.final_evaluation import Check
    from ctxext.search.measurement import Measurement
    from ctxext.search.study import Point, SearchState


_QUIET_SECONDS = 60.0


@contextmanager
def watching(output: Output) -> "Iterator[Callable[[SearchState], None]]":
    """Yield the callback that shows the progress of a search: each stage, each new best, and a line a minute.

    A terminal also shows a bar with the current stage.
    """
    stage, best, shown_at, started = "", -1, time.monotonic(), time.monotonic()

    def show(state: "SearchState") -> None:
        nonlocal stage, best, shown_at
        if output.stderr.is_terminal:
            total = state.end - started if math.isfinite(state.end) else state.max_trials or 0
            done = time.monotonic() - started if math.isfinite(state.end) else len(state.trials)
            advance(state_line(state), int(done), max(1, int(total)))
        # The part of a stage after a colon changes with every measurement.
        now = state.stage.split(":")[0], state.best.trial.number if state.best else -1
        if now == (stage, best) and time.monotonic() - shown_at <= _QUIET_SECONDS:
            return
        (stage, best), shown_at = now, time.monotonic()
        output.note(Text(state_line(state) + (f"; best {point_line(state.best)}" if state.best else "")))

    with output.progress("searching") as advance:
        yield show


def state_line(state: "SearchState") -> str:
    """Format the stage of a search, the number of evaluated recipes, and the time left."""
    parts = [state.stage]
    if state.trials:
        whole = f" of {state.max_trials}" if state.max_trials else ""
        stopped = len(state.trials) - len(state.points)
        parts.append(f"{len(state.trials)}{whole} recipes, {stopped} stopped early")
    if math.isfinite(state.end):
        parts.append(f"{format_duration(max(0.0, state.end - time.monotonic()))} left")
    return " · ".join(parts)


def point_line(point: "Point") -> str:
    """Format a recipe with its two losses."""
    return f"{point.trial.name} (answers {point.loss:.4f}, original context length {100 * point.rise:+z.2f} %)"


def points_table(points: "list[Point]", stock: "Measurement | None") -> Table:
    """Return a table of recipes with their two losses, and the unmodified model."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("recipe", overflow="fold")
    lengths = points[0].trial.measurement.lengths if points and points[0].trial.measurement else ()
    for name in ("loss of answers", "original context length", *(f"found at {length}" for length in lengths)):
        table.add_column(name, justify="right")
    for point in points:
        measurement = point.trial.measurement
        assert measurement is not None
        name = point.trial.name + (" (published)" if point.trial.published else "")
        shares = [f"{100 * measurement.exact(length):.0f} %" for length in lengths]
        table.add_row(name, f"{point.loss:.4f}", f"{100 * point.rise:+z.2f} %", *shares)
    if stock is not None and points:
        shares = [f"{100 * stock.exact(length):.0f} %" for length in lengths]
        table.add_row("unmodified", f"{stock.loss:.4f}", "", *shares, style="dim")
    return table


_CAP = 12
_STUDY = "Study"


@dataclass(frozen=True)
class StudyOptions:
    """Location of a study, and whether to resume or overwrite it."""

    study: str | None = option(
        None,
        help="SQLite file of the study, or its name in --storage. Default: the name of RECIPE.",
        panel=_STUDY,
    )
    storage: str | None = option(
        None,
        help="Storage that several machines share: a database URL such as postgresql://host/name, or the "
        "path of a journal file on a shared disk.",
        panel=_STUDY,
    )
    resume: bool = option(False, help="Continue the study; several processes may do so at once.", panel=_STUDY)
    overwrite: bool = option(False, help="Replace the study and RECIPE.", panel=_STUDY)

    def place(self, out: Path) -> StudyPlace:
        """Return the place of the study for a recipe file."""
        if self.storage is not None:
            return StudyPlace(name=self.study or out.stem, storage=self.storage)
        return StudyPlace(path=Path(self.study)) if self.study else default_study(out)


@takes_options(without=("attention", "trust_remote_code", "engine", "engine_arguments"))
def search_(
    source: SourceArgument,
    out: Annotated[
        Path,
        typer.Argument(metavar="RECIPE", help="Recipe file to write. NAME.png and NAME.db are saved next to it."),
    ] = Path("best.yaml"),
    *,
    options: SearchOptions,
    loading: Loading,
    study_options: StudyOptions,
    output: Output,
) -> None:
    """Search for the best recipe for a model without training, and write it to a recipe file.

    Examples:
    ctxext search demo best.yaml --target-length 2k --minutes 10

    ctxext search my-model best.yaml --target-length 32k --methods yarn,mspoe --data my-texts.jsonl
    """
    place = study_options.place(out)

    def print_resume_command() -> None:
        output.end_progress()
        if place.path is not None and not place.path.exists():
            return
        words = resuming_command()
        if study_options.storage:  # Hide the password in the URL.
            words = [word.replace(study_options.storage, redact_storage(study_options.storage)) for word in words]
        output.next_step(*words, why="Stopped. Resume with")

    with watching(output) as watch, exit_on_interrupt(print_resume_command):
        result = search(
            source,
            options,
            out=out,
            study=place,
            resume=study_options.resume,
            overwrite=study_options.overwrite,
            loading=loading,
            watch=watch,
        )
    from ctxext.search.study import find_pareto_front

    points = list(result.state.points)
    published = [point for point in points if point.trial.published]
    front = find_pareto_front(points)
    shown = sorted({id(point): point for point in [*front[:_CAP], *published]}.values(), key=lambda point: point.loss)
    lines: list[RenderableType] = [
        points_table(shown, result.state.stock),
        "",
        *format_results(result.check),
        "",
        verdict(result, options),
    ]
    warn_of_thoughts([(source, result.open_thought)], output)
    output.result(result_data(result, options), *lines)
    if result.recipe is not None:
        output.note(done_line(out, result.recipe.summary()))
    picture = out.with_suffix(".png") if is_installed("matplotlib") else f"none (run {install_command('matplotlib')})"
    output.note(f"Pareto front: {picture}   study: {place}")
    if result.recipe is not None:
        output.next_step("ctxext", "convert", source, "OUT", "--recipe", out)


def verdict(result: SearchResult, options: SearchOptions) -> str:
    """Return the conclusion in one sentence, with a second one if another recipe answers more prompts."""
    check = result.check
    if check.winner is None:
        first = (
            f"No recipe keeps the loss at the original context length within {options.keep_short:.1%} with "
            "confidence. Use the unmodified model, or allow more with --keep-short."
        )
    elif result.recipe is None:
        assert check.winner_answers is not None, "a winner was measured"
        gain, half = check.gain
        first = (
            "No recipe is significantly better than the unmodified model. On unseen prompts, the best changes the loss "
            f"of an answer by {-gain:+z.4f} ± {half:.4f} and finds {check.winner_answers.share:.0%} of the needles, "
            f"the unmodified model {check.stock.share:.0%}."
        )
    else:
        gain, half = check.gain
        rise, spread = check.rise
        first = (
            f"{result.recipe.summary()} lowers the loss of an answer by {gain:.3f} ± {half:.3f} on unseen prompts and "
            f"changes the loss at the original context length by {100 * rise:+z.2f} ± {100 * spread:.2f} %."
        )
    return f"{first} {_more(check)}".strip()


def _more(check: "Check") -> str:
    """Describe the recipe that answers more prompts than the winner, with the reason it lost; empty if none does."""
    point = check.finds_more
    if point is None:
        return ""
    answers = check.answers[point.trial.number]
    target = max(answers.lengths)
    rise, spread = answers.rise(check.stock)
    cost = f"the loss at the original context length by {100 * rise:+z.2f} ± {100 * spread:.2f} %"
    why = (
        f"but changes {cost}, more than the limit of {100 * check.keep_short:g} %."
        if rise + spread > check.keep_short
        else f"but the loss of its answers is higher. It changes {cost}."
    )
    ours = f" instead of {check.winner_answers.share:.1%}" if check.winner_answers else ""
    return (
        f"{point.trial.name} answers more prompts, {answers.share:.1%} ({answers.exact(target):.1%} at {target} tokens)"
        f"{ours}, {why}"
    )


def result_data(result: SearchResult, options: SearchOptions) -> dict[str, Any]:
    """Return the result of a search as JSON."""
    from ctxext.search.study import find_pareto_front

    def point_data(point: Any) -> dict[str, Any]:
        measurement = point.trial.measurement
        return {
            "trial": point.trial.number,
            "published": point.trial.published,
            "recipe": point.trial.recipe.to_dict(),
            "loss": point.loss,
            "rise": point.rise,
            "found": {str(length): measurement.exact(length) for length in measurement.lengths},
        }

    points, check = result.state.points, result.check
    return {
        "recipe": result.recipe.to_dict() if result.recipe else None,
        "verdict": verdict(result, options),
        "trials": len(result.state.trials),
        **({"open_thought": result.open_thought} if result.open_thought else {}),
        "front": [point_data(point) for point in find_pareto_front(points)],
        "published": [point_data(point) for point in points if point.trial.published],
        "checked": {
            "unmodified": _answers_data(check, check.stock),
            "recipes": [
                {
                    "trial": number,
                    "recipe": check.points[number].trial.name,
                    "published": check.points[number].trial.published,
                    "taken": check.points[number] is check.winner,
                    **_answers_data(check, answers),
                }
                for number, answers in check.answers.items()
            ],
        },
        "gain": list(check.gain),
        "rise": list(check.rise),
        "files": [str(path) for path in result.files],
    }


def _answers_data(check: "Check", answers: "Measurement") -> dict[str, Any]:
    exact = {str(length): answers.exact(length) for length in answers.lengths}
    return {"loss": answers.loss, "rise": answers.rise(check.stock)[0], "prompts": answers.num_prompts, "found": exact}
