"""The whole evaluation: check everything, run every model, write the report."""

import dataclasses
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ctxext.checkpoint.durations import Pace, cost_of, format_duration, size_of
from ctxext.checkpoint.loading import choose_device, fast_cpu_dtype
from ctxext.console import shows_progress
from ctxext.errors import CtxextError
from ctxext.evaluate.plan import ModelPlan, default_tasks, plan_questions
from ctxext.evaluate.processes import Team, take_device
from ctxext.evaluate.results_log import ResultsLog
from ctxext.evaluate.stages import Stage, stages_in_rounds
from ctxext.files import processes
from ctxext.files.content import Progress
from ctxext.files.output_directory import only_run_in
from ctxext.files.packages import is_installed
from ctxext.files.processes import forget_peak, peak_memory
from ctxext.notebook import table
from ctxext.options import accepts_options
from ctxext.report.findings import findings
from ctxext.report.page import write_report
from ctxext.report.report import Report, explain_malformed, make_report, versions
from ctxext.tasks.harness import check_harness
from ctxext.tasks.settings import Settings

if TYPE_CHECKING:
    from ctxext.models.model import LoadedModel, Loading
    from ctxext.report.tables import Table
    from ctxext.tasks.base import Key, Record, RetrievalTask, Work

_LONG = 600
_MINUTE = 60
_PICTURE = 0.5
"""Seconds to draw the pictures of a model and a task, and those of the page."""


class EvaluationReport(dict[str, Any]):
    """The content of report.json; a notebook displays its findings."""

    def _repr_html_(self) -> str:
        return table(dict(enumerate(findings(self), 1)))


@accepts_options(Settings, "settings")
@shows_progress("evaluating")
def evaluate(
    models: str | Path | Sequence[str | Path],
    settings: Settings,
    *,
    loading: "Loading | None" = None,
    out: str | Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    minutes: float | None = None,
    progress: Progress | None = None,
) -> Report:
    """Measure how well checkpoints use their context, and the cost of extending it.

    Args:
        models: A folder, a Hub id or `demo`; or several. With a server, an empty list takes the lengths of prompts from
            its counts.
        settings: Tasks, lengths, depths and samples. Each field is also a keyword of this function, as samples=50.
        loading: How to load the models.
        out: A folder for results, pictures and the report; None writes nothing.
        resume: Continue with the results in `out`.
        overwrite: Replace the results in `out`.
        minutes: The time limit; all models then stay loaded, and are measured on one sample of every cell, then on
            more. None for no limit.
        progress: Called with a label, the work done and the total work. By default, a terminal or a notebook shows a
            progress bar.

    Returns:
        The content of report.json.

    Raises:
        CtxextError: A model, a file or a setting is invalid; raised before anything runs if possible.
    """
    sources = [str(model) for model in ([models] if isinstance(models, str | Path) else models)]
    options: dict[str, Any] = {"resume": resume, "overwrite": overwrite, "minutes": minutes, "progress": progress}
    return plan_run(sources, settings, loading=loading, out=out, **options).report()


def plan_run(
    sources: Sequence[str],
    settings: Settings,
    *,
    loading: "Loading | None" = None,
    out: str | Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    minutes: float | None = None,
    progress: Progress | None = None,
) -> "Run":
    """Plan an evaluation; the arguments are those of `evaluate`."""
    from ctxext.models.model import Loading, load_model

    started = time.monotonic()
    out, loading = None if out is None else Path(out), loading or Loading()
    if not sources and loading.server is None:
        raise CtxextError("The list of models is empty.", hint="Add a folder, a Hub id or demo.")
    if not sources and settings.prompt == "base":
        raise CtxextError(
            "--prompt base needs the tokenizer of the served model.", hint="Give its checkpoint: ctxext eval MODEL …"
        )
    if minutes is not None:
        _check_limit(minutes, settings, loading)
    if not settings.tasks:
        settings = dataclasses.replace(settings, tasks=default_tasks(sources, loading))
    if loading.engine != "transformers":
        from ctxext.models.serving import check_tasks

        check_tasks(settings.tasks, settings.harness, loading, processes.num_processes())
        settings = dataclasses.replace(settings, generate=True)
    else:
        take_device(loading.device)
    check_harness(settings.harness)
    plans = plan_questions(sources, settings, loading)
    check_harness(settings.harness, sorted({length for plan in plans for length in plan.lengths}))

    def load(entry: ModelPlan) -> "LoadedModel":
        if loading.engine == "transformers":
            return load_model(entry.info, loading, entry.encoder.tokenizer)
        from ctxext.models.serving import load_served

        return load_served(entry.info, loading, (*entry.lengths, entry.longest_prompt))

    end = end_of(started, minutes, len(plans) * len(settings.tasks) if out else 0)
    return Run(plans, settings, loading, load, out, resume, overwrite, progress, end)


def _check_limit(minutes: float, settings: Settings, loading: "Loading") -> None:
    """Raise if a time limit is not above 0, or cannot be combined with the other options."""
    if not minutes > 0:
        raise CtxextError("--minutes must be above 0.", hint="For example: --minutes 10.")
    if loading.engine != "transformers" or settings.harness:
        flag = "--harness" if settings.harness else "--engine" if loading.server is None else "--server"
        raise CtxextError(f"--minutes cannot be combined with {flag}.", hint="Remove one of them.")


def end_of(started: float, minutes: float | None, num_pictures: int) -> float:
    """Return the end of measuring on the monotonic clock, which reserves time to draw pictures."""
    if minutes is None:
        return math.inf
    return started + _MINUTE * minutes - _PICTURE * (1 + (num_pictures if is_installed("matplotlib") else 0))


@dataclass
class Run:
    """A planned evaluation; `report` runs it once.

    Attributes:
        plans: The work of each model.
        settings: Tasks, depths and samples.
        loading: Options for loading models.
        load: Loads the model of a plan, from its folder or by applying a recipe in memory.
        out: The folder of results; None keeps them in memory.
        resume: Continue with the results in `out`.
        overwrite: Replace the results in `out`.
        progress: Called with a label, the work done and the total work.
        end: The time to stop, on the monotonic clock. All models then stay loaded and are measured in stages, so that
            all have the same questions whenever the time is up.
        longest_first: Whether the longest texts of a stage are measured first, instead of the shortest, which may leave
            no time for these.
        stages: Returns the stages until the end, each after the one before it is measured; by default rounds. Its
            argument returns all records.
        unseen: The estimated ratio of the time of each model to that of the first one, before it is measured.
        watches_memory: Whether to record the peak memory of each model.
        complete: Adds results computed from single records to the report; returns tables of them for the page.
        pace: The measured speed of the models; by default it is measured.
        team: The processes that share the work.
    """

    plans: Sequence[ModelPlan]
    settings: Settings
    loading: "Loading"
    load: "Callable[[ModelPlan], LoadedModel]"
    out: Path | None
    resume: bool
    overwrite: bool
    progress: Progress | None = None
    end: float = math.inf
    longest_first: bool = False
    stages: "Callable[[Callable[[], Sequence[Record]]], Iterable[Stage]] | None" = None
    unseen: Mapping[str, float] = field(default_factory=dict)
    watches_memory: bool = False
    complete: "Callable[[Report, Sequence[Record]], Sequence[Table]] | None" = None
    pace: Pace | None = None
    team: Team = field(default_factory=Team)

    def __post_init__(self) -> None:
        self.missed: list[Missed] = []

    def report(self) -> Report:
        """Measure the missing samples and write the report; only the first process returns it, the others return {}."""
        out, team = self.out, self.team
        if out is None and team.size > 1:
            raise CtxextError("Several processes need a common folder.", hint="Add --out report.")
        with nullcontext() if out is None else only_run_in(out):
            self._log = ResultsLog(out, team.rank)
            header = _make_header(self.plans, self.settings, self.loading) if team.is_first else {}
            team.share("log", lambda: self._log.begin(header, resume=self.resume, overwrite=self.overwrite))
            self._meter = Meter(self.plans, self.progress, self.settings.samples, end=self.end, team=team)
            if self.pace is not None:
                self._meter.share_pace(self.pace)
            self._peaks = dict[str, int]()
            if math.isinf(self.end):
                for entry in self.plans:
                    self._measure_all(entry)
            else:
                self._measure_in_stages()
            team.add("finished", 1)
            if not team.is_first:
                return {}
            team.wait("finished", team.size, self._meter.wait)
            # Only lines of an earlier run may be malformed.
            with explain_malformed(str(out)) if self.resume else nullcontext():
                records = self._log.records()
                report = EvaluationReport(make_report(header, records))
                if self.missed:
                    report["num_missed"] = len({(each.model, key) for each in self.missed for key in each.work.keys})
                if self._log.num_skipped:
                    report["skipped_lines"] = self._log.num_skipped
                added = self.complete(report, records) if self.complete is not None else ()
                if out is not None:
                    write_report(report, out, added)
                return report

    def _measure_all(self, entry: ModelPlan) -> None:
        """Run the remaining work for a model: what no other process takes, the longest texts first if there are any."""
        name, team = entry.info.name, self.team
        done = self._log.done(name)
        needs_harness = bool(self.settings.harness and entry.lengths) and team.is_first
        needs_harness = needs_harness and not any("harness" in record for record in self._log.records_of(name))
        if team.add(f"{name}, all taken") and not needs_harness:
            return
        if len(done) >= len(entry.measured_lengths) and not needs_harness:
            if team.takes(f"{name}, already measured"):
                self._meter.skip(name, entry.measured_lengths, name)
            return
        loaded = self.load(entry)
        try:
            self._log.append({"model": name, "facts": loaded.facts()})
            self._estimate_all(loaded)
            self._meter.begin()
            with self._record_peak(loaded):
                works = entry.make_work(loaded, team=team)
                for work in works if team.size == 1 else sorted(works, key=_count_tokens, reverse=True):
                    if team.takes(f"{name} {work.keys[0]}"):
                        self._measure(loaded, work, done)
                team.add(f"{name}, all taken", 1)
            if needs_harness:
                from ctxext.tasks.harness import run_harness

                metrics = run_harness(loaded, self.settings.harness, entry.lengths, self.settings.samples)
                self._log.append({"model": name, "harness": metrics})
        finally:
            loaded.close()

    def _measure_in_stages(self) -> None:
        """Measure all models stage by stage until the time is up."""
        meter, models = self._meter, {entry.info.name: self.load(entry) for entry in self.plans}
        done = {name: self._log.done(name) for name in models}
        for name, loaded in models.items():
            self._log.append({"model": name, "facts": loaded.facts()})
        meter.begin()
        self._estimate_all(models[self.plans[0].info.name])
        rounds = stages_in_rounds([*models], self.settings.samples)
        for stage in rounds if self.stages is None else self.stages(self._log.records):
            for cell, group in self._group_work(stage, models):
                group = [(name, work) for name, work in group if set(work.keys) - done[name]]
                seconds = [self._estimate(name, work, models[name], done[name]) for name, work in group]
                if time.monotonic() + math.fsum(seconds) > self.end:
                    self.missed += [Missed(*entry, each) for entry, each in zip(group, seconds, strict=True)]
                    continue
                # All models of a cell run in one process, so that they have the same questions when the time is up.
                if not self.team.takes(f"{stage} {cell}"):
                    continue
                for number, (name, work) in enumerate(group):
                    if time.monotonic() + self._estimate(name, work, models[name], done[name]) > self.end:
                        self.missed += [
                            Missed(*entry, each) for entry, each in zip(group[number:], seconds[number:], strict=True)
                        ]
                        break
                    # A later stage of another process may contain the same samples.
                    done[name] |= {key for key in {*work.keys} - done[name] if not self.team.takes(f"{name} {key}")}
                    with self._record_peak(models[name]):
                        self._measure(models[name], work, done[name])
                    done[name] |= {*work.keys}

    def _group_work(
        self, stage: Stage, models: "Mapping[str, LoadedModel]"
    ) -> "list[tuple[tuple[int, str], list[tuple[str, Work]]]]":
        """Return the work of a stage by cell, in the order of the lengths, each with the models that it measures."""
        works: dict[tuple[int, str], list[tuple[str, Work]]] = {}
        for entry in self.plans:
            name = entry.info.name
            if name in stage.models:
                for work in entry.make_work(models[name], stage.samples, self.team):
                    if stage.contains(work.task.name, work.length):
                        number = work.keys[0].sample if len(work.keys) == 1 else stage.samples.start
                        works.setdefault((work.length, f"{work.label} {number}"), []).append((name, work))
        return sorted(works.items(), key=lambda item: (-item[0][0] if self.longest_first else item[0][0], item[0][1]))

    def _estimate(self, name: str, work: "Work", loaded: "LoadedModel", done: "set[Key]") -> float:
        unseen = self.unseen.get(name, 1.0)
        return self._meter.estimate(name, work, set(work.keys) - done, can_share=loaded.can_share, unseen=unseen)

    def _estimate_all(self, loaded: "LoadedModel") -> None:
        """Measure the speed of the first model, and estimate the time of the whole run."""
        entry = next(entry for entry in self.plans if entry.info.name == loaded.name)
        is_here = self.loading.engine == "transformers" and entry.measured_lengths
        if self._meter.is_known or not is_here or (self.progress is None and math.isinf(self.end)):
            return
        num_tokens = math.fsum(length for plan in self.plans for length in plan.measured_lengths)
        self._meter.begin_pace(loaded.name, loaded.first_pace(min(entry.measured_lengths), num_tokens))
        planned = [(plan, self._log.done(plan.info.name)) for plan in self.plans]
        seconds = math.fsum(
            self._estimate(plan.info.name, work, loaded, done)
            for plan, done in planned
            for work in plan.make_work(loaded)
        )
        drawn = _PICTURE if self.out is not None else 0.0
        self._meter.report_estimate(min(seconds / self.team.size + drawn, self.end - time.monotonic()))

    def _measure(self, loaded: "LoadedModel", work: "Work", done: "set[Key]") -> None:
        """Measure the missing samples, and record each cell immediately."""
        name, label = loaded.name, f"{loaded.name} {work.label}"
        self._meter.skip(name, [key.length for key in work.keys if key in done], label)
        began = started = time.perf_counter()
        for record in work.run(loaded, set(work.keys) - done):
            seconds, started = round(time.perf_counter() - started, 4), time.perf_counter()
            self._log.append({"model": name, **record, "seconds": seconds})
            self._meter.advance(name, [record["length"]] * len(record["samples"]), label)
        seconds, keys = time.perf_counter() - began, set(work.keys) - done
        self._meter.record(name, work, keys, seconds, can_share=loaded.can_share)

    @contextmanager
    def _record_peak(self, loaded: "LoadedModel") -> Iterator[None]:
        """Record a model's peak memory if it increased."""
        watches = self.watches_memory and forget_peak(loaded.device)
        yield
        if watches and (peak := peak_memory(loaded.device)) > self._peaks.get(loaded.name, 0):
            self._peaks[loaded.name] = peak
            self._log.append({"model": loaded.name, "facts": {"peak_memory": peak}})


def _count_tokens(work: "Work") -> int:
    return sum(key.length for key in work.keys)


@dataclass(frozen=True)
class Missed:
    """Work that did not fit into the time.

    Attributes:
        model: The name of the model.
        work: The work.
        seconds: Its estimated time.
    """

    model: str
    work: "Work"
    seconds: float


def _make_header(plans: Sequence[ModelPlan], settings: Settings, loading: "Loading") -> dict[str, Any]:
    from ctxext.models.serving import engine_versions

    hidden = ("token", "server", *(("engine", "engine_arguments") if loading.engine == "transformers" else ()))
    options = {key: value for key, value in dataclasses.asdict(loading).items() if key not in hidden}
    if loading.server is not None:
        options["served_model"] = loading.server.connection.model
    elif loading.dtype == "auto" and choose_device(loading.device).type == "cpu":
        options["dtype_of_bf16_weights"] = str(fast_cpu_dtype()).removeprefix("torch.")
    return {
        "settings": settings.to_dict(),
        "loading": options,
        "models": [
            {**entry.info.facts(), "lengths": list(entry.lengths), **describe_forms(entry.tasks)} for entry in plans
        ],
        "versions": {**versions(), **engine_versions(loading)},
    }


def describe_forms(tasks: "Sequence[RetrievalTask]") -> dict[str, Any]:
    """Return the form of the prompts of each task that has another than the base form."""
    forms = {
        task.name: {
            **{"form": "chat", "room": task.answer_room, "thinks": task.form.thinks},
            **({} if task.form.estimate is None else {"estimate": dataclasses.asdict(task.form.estimate)}),
        }
        for task in tasks
        if task.form.is_chat
    }
    return {"forms": forms} if forms else {}


class Meter:
    """Progress by cost, and the estimated time of prompts.

    Args:
        plans: The work of all models.
        progress: Called at every step.
        samples: The number of samples per cell, for the advice.
        clock: Returns the time in seconds.
        end: The end of the run by the clock, complete or not.
        team: The processes that share the work; the first one shows the progress of all.
    """

    def __init__(
        self,
        plans: Sequence[ModelPlan],
        progress: Progress | None,
        samples: int,
        clock: Callable[[], float] = time.monotonic,
        end: float = math.inf,
        team: Team | None = None,
    ) -> None:
        self.progress, self.samples, self.clock = progress, samples, clock
        self.started, self.end = clock(), end
        self._costs = {plan.info.name: cost_of(plan.info.checkpoint.config) for plan in plans}
        self.total = sum(self.cost(plan.info.name, plan.measured_lengths) for plan in plans)
        self.reached = self._spent = 0
        self._team = team or Team(rank=0, size=1)
        self._seconds, self._at = 0.0, clock()
        paces: dict[object, Pace] = {}
        configs = {plan.info.name: plan.info.checkpoint.config for plan in plans}
        self._paces = {name: paces.setdefault(size_of(config), Pace(config)) for name, config in configs.items()}
        lengths = [length for plan in plans for length in plan.measured_lengths]
        self._work = f"{len(lengths):,} prompts and documents of {sum(lengths):,} tokens"
        self._report(self._work, 0)

    def cost(self, model: str, lengths: Iterable[int]) -> int:
        """Return the cost of prompts for a model."""
        return sum(map(self._costs[model], lengths))

    def begin(self) -> None:
        """Start the clock after the model is loaded."""
        self._at = self.clock()

    def skip(self, model: str, lengths: Iterable[int], label: str) -> None:
        """Count prompts that are already measured."""
        self._report(label, self.cost(model, lengths))

    def advance(self, model: str, lengths: Iterable[int], label: str) -> None:
        """Count measured prompts, and report the time left."""
        now = self.clock()
        self._seconds, self._at = self._seconds + now - self._at, now
        cost = self.cost(model, lengths)
        self._spent += cost
        left = self._seconds / self._spent * (self.total - self._team.add("progress") - cost) / self._team.size
        is_long = left >= _LONG and math.isinf(self.end) and self.samples > 1
        advice = f", half of it with --samples {max(1, self.samples // 2)}" if is_long else ""
        left = max(0.0, min(left, self.end - now))
        self._report(f"{label} ({format_duration(left)} left{advice})", cost)

    def wait(self) -> None:
        """Report the progress of the other processes."""
        self._report("waiting for the other processes", 0)

    def report_estimate(self, seconds: float) -> None:
        """Report the estimated time of all."""
        self._report(f"{self._work} ({format_duration(seconds)} left)", 0)

    @property
    def is_known(self) -> bool:
        """Whether the speed of the first model is known."""
        return next(iter(self._paces.values())).is_known

    def share_pace(self, pace: Pace) -> None:
        """Use the measured speed of all models."""
        self._paces = dict.fromkeys(self._paces, pace)

    def begin_pace(self, model: str, read: Sequence[tuple[int, float]]) -> None:
        """Begin with the speed of a model, as `Pace.begin` does."""
        self._paces[model].begin(model, read)

    def record(self, model: str, work: "Work", keys: "Collection[Key]", seconds: float, *, can_share: bool) -> None:
        """Record the time in which a model measured some samples."""
        lengths, is_written = work.list_readings(keys, can_share=can_share), work.count_written(keys) > 0
        self._paces[model].record(model, work.task.name, lengths, seconds, is_written=is_written)

    def estimate(
        self, model: str, work: "Work", keys: "Collection[Key]", *, can_share: bool, unseen: float = 1.0
    ) -> float:
        """Estimate the seconds in which a model measures some samples; of an unknown size, as fast as the first."""
        known = self._paces[model]
        pace = known if known.is_known else next(iter(self._paces.values()))
        lengths = work.list_readings(keys, can_share=can_share)
        return pace.estimate(model, work.task.name, lengths, work.count_written(keys), unseen)

    def _report(self, label: str, cost: int) -> None:
        self.reached = self._team.add("progress", cost)
        if self.progress is not None:
            share = (self.clock() - self.started) / (self.end - self.started)  # 0 if there is no end.
            self.progress(label, max(self.reached, int(share * self.total)), self.total)
