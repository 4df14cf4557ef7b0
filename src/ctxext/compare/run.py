"""Run a comparison: load the weights once, apply every recipe in memory, and evaluate all on the same prompts."""

import dataclasses
import functools
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from ctxext.compare.budget import Budget
from ctxext.compare.candidates import STOCK, Candidate, CompareOptions, candidates_of
from ctxext.compare.page import BENCH, PAGE, format_bench, format_markdown, tabulate_differences
from ctxext.compare.schedule import Schedule
from ctxext.compare.verdict import compare_results, judge_results
from ctxext.console import shows_progress
from ctxext.errors import CtxextError, NothingMeasuredError
from ctxext.evaluate.plan import ModelPlan, plans_of
from ctxext.evaluate.processes import Team, take_device
from ctxext.evaluate.results_log import check_resumable, read_lengths
from ctxext.evaluate.run import Run, end_of
from ctxext.evaluate.stages import Stage
from ctxext.files.content import Progress, report_stage
from ctxext.files.output_directory import write_whole
from ctxext.files.processes import rank
from ctxext.models.checkpoint_info import CheckpointInfo, open_infos
from ctxext.options import accepts_options
from ctxext.recipes.recipe import Recipe, recipe_from_dict
from ctxext.report.report import Report
from ctxext.report.tables import Table
from ctxext.tasks.harness import check_harness

if TYPE_CHECKING:
    from ctxext.models.model import LoadedModel, Loading
    from ctxext.models.recipe_applier import RecipeApplier
    from ctxext.tasks.base import Record


@dataclass(frozen=True, kw_only=True)
class AppliedInfo(CheckpointInfo):
    """A checkpoint with a recipe that is applied in memory.

    Attributes:
        stock: The checkpoint.
        recipe: The recipe, including measured parameters.
    """

    stock: CheckpointInfo
    recipe: Recipe

    @cached_property
    def digest(self) -> str:
        """Digest of the checkpoint; reports contain the recipe separately."""
        return self.stock.digest

    @override
    def facts(self) -> dict[str, Any]:
        applied = {"recipe": self.recipe.to_dict(), "summary": self.recipe.summary(), "source": STOCK}
        return {**super().facts(), **applied}


@accepts_options(CompareOptions)
@shows_progress("comparing")
def compare(
    source: str | Path,
    *,
    options: CompareOptions,
    loading: "Loading | None" = None,
    out: str | Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
    notify: Callable[[str], None] | None = None,
) -> Report:
    """Apply published methods to a model in memory, with one copy of the weights, and compare them.

    Args:
        source: A folder, a Hub id or `demo`.
        options: Methods, tasks, lengths and time. Each field is also a keyword argument of this function.
        loading: How to load the model.
        out: A folder for results, pictures and the report, as `evaluate` writes them; None writes nothing.
        resume: Continue with the results in `out`.
        overwrite: Replace the results in `out`.
        progress: Called with a label, the work done and the total work. By default, a terminal or a notebook shows a
            progress bar.
        notify: Called with an estimate of the work that fits into the time.

    Returns:
        The report of `evaluate` on all models. Its `comparison` has a row for each model: the share found, and
        compared with the unmodified model the loss beyond and within the original context length, time and memory.
        It also contains the recommended method.

    Raises:
        CtxextError: The source, a method or a setting is invalid, no method applies, or the time is too short to
            read one text.
    """
    started = time.monotonic()
    from ctxext.models.model import Loading, load_model
    from ctxext.models.recipe_applier import RecipeApplier

    loading, out = loading or Loading(), None if out is None else Path(out)
    if loading.engine != "transformers":
        raise CtxextError("compare supports transformers only.", hint="Remove --engine.")
    take_device(loading.device)
    (info,) = open_infos(
        [str(source)], revision=loading.revision, token=loading.token, original_length=options.original_length
    )
    candidates = candidates_of(info.checkpoint, options.methods, options.target_length)
    if resume and out is not None and not options.lengths:
        options = dataclasses.replace(options, lengths=read_lengths(out))
    settings, minutes = options.settings(info.kind, info.trained_length), options.time_limit
    check_harness(settings.harness, settings.lengths)
    if out is not None and rank() == 0:  # The others may be later than its log.
        names = [STOCK, *(candidate.name for candidate in candidates if candidate.recipe)]
        check_resumable(out, settings.to_dict(), names, resume=resume, overwrite=overwrite)
    # A position table ends at the context length of the unmodified model; recipes lengthen it.
    endless = dataclasses.replace(info, context_length=max(settings.lengths), has_table=False)
    drawn = len(settings.tasks) if out else 0
    # The other plans are of the source of a converted checkpoint; here the checkpoint itself is the baseline.
    plan, *_ = plans_of([endless], settings, loading)
    report_stage(progress, "loading the model")
    stock, team = load_model(info, loading, plan.encoder.tokenizer), Team()
    budget = Budget(plan, info, [candidate for candidate in candidates if candidate.recipe], stock)

    def choose(*, is_calibrated: bool) -> Schedule:
        """Choose what fits into the rest of the time; the same in all processes."""
        if minutes is None:
            return Schedule(settings.lengths)
        end, is_given = end_of(started, minutes, drawn * (1 + len(budget.candidates))), bool(options.lengths)

        def choose_here() -> dict[str, Any]:
            try:
                left = end - time.monotonic()
                chosen = budget.choose(left, team.size, is_given=is_given, is_calibrated=is_calibrated)
            except NothingMeasuredError:
                if not resume:  # Of a resumed run, less may remain.
                    raise
                chosen = Schedule(settings.lengths)
            return dataclasses.asdict(chosen)

        chosen = team.share(f"schedule {is_calibrated}", choose_here)
        return Schedule(**{**chosen, "lengths": tuple(chosen["lengths"])})

    if minutes is not None:
        report_stage(progress, "measuring the speed")
        budget.measure()
        choose(is_calibrated=False)  # Raises before minutes of calibration.
    with tempfile.TemporaryDirectory() as folder:
        applier = RecipeApplier(stock, info.checkpoint, Path(folder) / Path(folder).name)
        applied, candidates = _apply_candidates(info, applier, candidates, team, progress)
        schedule = choose(is_calibrated=True)
        if minutes is not None and notify is not None and team.is_first:
            notify(budget.describe(schedule, team.size, minutes))
        if not schedule.is_whole and not options.lengths:
            inside = (info.context_length,) if info.has_table and info.context_length else ()
            settings = dataclasses.replace(settings, lengths=(*inside, *schedule.lengths))
            plan, *_ = plans_of([endless], settings, loading)
        plans = [_limit_to_context(dataclasses.replace(plan, info=dataclasses.replace(info, name=STOCK)), info)]
        plans += [dataclasses.replace(plan, info=applied_info) for applied_info, _ in applied]
        models = {STOCK: dataclasses.replace(stock, name=STOCK), **{entry.name: model for entry, model in applied}}
        documents = list(dict.fromkeys(work.keys[0].task for work in plan.documents))

        def stages(records: "Callable[[], Sequence[Record]]") -> Iterator[Stage]:
            questions = [task.name for task in plan.tasks]
            return schedule.stages(
                [*models], questions, documents, settings.samples, lambda: judge_results(records(), plans)
            )

        def complete(report: Report, records: "Sequence[Record]") -> list[Table]:
            report["comparison"] = {
                "source": info.name,
                "target_length": options.target_length,
                "minutes": minutes,
                **compare_results(report, records, candidates, plans, run.missed, minutes, options.target_length),
            }
            return [tabulate_differences(report)]

        run = Run(
            plans,
            settings,
            loading,
            load=lambda entry: models[entry.info.name],
            out=out,
            resume=resume,
            overwrite=overwrite,
            progress=progress,
            end=end_of(started, minutes, drawn * len(plans)),
            stages=stages,
            unseen=budget.unseen,
            watches_memory=True,
            complete=complete,
            pace=budget.pace,
            team=team,
        )
        report = run.report()
        if out is not None and report:
            write_whole(out / PAGE, format_markdown(report).encode())
            write_whole(out / BENCH, format_bench(report).encode())
        return report


def _apply_candidates(
    info: CheckpointInfo,
    applier: "RecipeApplier",
    candidates: Sequence[Candidate],
    team: Team,
    progress: Progress | None,
) -> "tuple[list[tuple[AppliedInfo, LoadedModel]], list[Candidate]]":
    """Apply the candidates to the loaded weights; return the applied ones, and all candidates with refusals."""
    applied, judged = [], []

    def prepare(recipe: Recipe) -> dict[str, Any]:
        return applier.prepare(recipe, progress).to_dict()

    for candidate in candidates:
        judged.append(candidate)
        if candidate.recipe is None or candidate.plan is None:
            continue
        report_stage(progress, f"applying {candidate.name}")
        try:
            # A head order is measured once: another device may compute another one.
            content = team.share(candidate.name, functools.partial(prepare, candidate.recipe))
            recipe = recipe_from_dict(content, candidate.name)
            model = applier.apply(recipe)
        except CtxextError as error:
            judged[-1] = dataclasses.replace(candidate, plan=None, recipe=None, refusal=error.message)
            continue
        encoding = candidate.plan.encoding
        applied_info = AppliedInfo(
            candidate.name,
            info.checkpoint,
            encoding.trained_length,
            encoding.usable_length,
            stock=info,
            recipe=recipe,
        )
        applied.append((applied_info, dataclasses.replace(model, name=candidate.name, kind=info.kind)))
    if not applied:
        raise CtxextError(f'No method can be applied to "{info.name}": {judged[0].refusal}')
    return applied, judged


def _limit_to_context(entry: ModelPlan, info: CheckpointInfo) -> ModelPlan:
    """Return the part of a plan that the unmodified model can read, limited by a position table if it has one."""
    limit = info.context_length
    if not info.has_table or limit is None:
        return entry
    lengths = tuple(length for length in entry.lengths if length <= limit)
    documents = tuple(work for work in entry.documents if all(key.length <= limit for key in work.keys))
    return dataclasses.replace(entry, lengths=lengths, documents=documents)
