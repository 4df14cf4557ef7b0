"""The evaluation from top to bottom: check everything, run every model, write the report."""

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ctxext.checkpoint.loading import choose_device, fast_cpu_dtype
from ctxext.errors import CtxextError
from ctxext.evaluate.plan import ModelPlan, default_tasks, plan_questions
from ctxext.evaluate.report.findings import findings
from ctxext.evaluate.report.report import Report, explain_malformed, make_report, versions, write_report
from ctxext.evaluate.results_log import ResultsLog
from ctxext.evaluate.settings import Settings
from ctxext.evaluate.tasks.harness import check_harness
from ctxext.files import processes
from ctxext.files.content import Progress
from ctxext.files.memory import forget_peak, peak_memory
from ctxext.files.output_directory import only_run_in
from ctxext.notebook import table

if TYPE_CHECKING:
    from ctxext.evaluate.model import LoadedModel, Loading
    from ctxext.evaluate.tasks.base import Key, Record, Work

_UNIT = 64
_MINUTE = 60
_LONG = 10 * _MINUTE
_USUAL_BREAK_EVEN = 8192
_UNSEEN = 1.5
"""How much longer than their cost says prompts of a new length may take, as relation maps do beyond the old context."""


class Meter:
    """Progress by cost: a token of a long prompt costs more than one of a short prompt.

    Args:
        plans: The work of all models.
        progress: Called at every step.
        samples: The number of samples per cell, for the hint.
        clock: Returns seconds.
        end: When the run stops by the clock, done or not.
    """

    def __init__(
        self,
        plans: Sequence[ModelPlan],
        progress: Progress | None,
        samples: int,
        clock: Callable[[], float] = time.monotonic,
        end: float = math.inf,
    ) -> None:
        self.progress, self.samples, self.clock = progress, samples, clock
        self.started, self.end = clock(), end
        self._break_even = {plan.info.name: break_even(plan.info.checkpoint.config) for plan in plans}
        self.total = sum(self._plan_cost(plan) for plan in plans)
        self.reached = self._spent = 0
        self._seconds, self._at = 0.0, clock()
        count, tokens = sum(plan.num_samples for plan in plans), sum(plan.num_tokens for plan in plans)
        self._report(f"{count:,} prompts and documents of {tokens:,} tokens", 0)

    def cost(self, model: str, length: int) -> int:
        """The cost of a prompt of a length for a model, at least 1."""
        return cost_of(length, self._break_even[model])

    def begin(self) -> None:
        """Start the clock, once the model is loaded."""
        self._at = self.clock()

    def skip(self, model: str, lengths: Sequence[int], label: str) -> None:
        """Count prompts that need not run."""
        self._report(label, sum(self.cost(model, length) for length in lengths))

    def skip_plan(self, plan: ModelPlan) -> None:
        """Count all prompts of a model."""
        self._report(plan.info.name, self._plan_cost(plan))

    def advance(self, model: str, lengths: Sequence[int], label: str) -> None:
        """Count prompts that have run, and report the time left."""
        now = self.clock()
        self._seconds, self._at = self._seconds + now - self._at, now
        cost = sum(self.cost(model, length) for length in lengths)
        self._spent += cost
        left = self._seconds / self._spent * (self.total - self.reached - cost)
        is_long = left >= _LONG and math.isinf(self.end)
        advice = f", half of it with --samples {max(1, self.samples // 2)}" if is_long else ""
        left = max(0.0, min(left, self.end - now))
        self._report(f"{label} ({in_words(left)} left{advice})", cost)

    def _plan_cost(self, plan: ModelPlan) -> int:
        prompts = len(plan.tasks) * len(plan.settings.depths) * plan.settings.samples
        name = plan.info.name
        documents = sum(self.cost(name, key.length) for work in plan.documents for key in work.keys)
        return documents + prompts * sum(self.cost(name, length) for length in plan.lengths)

    def _report(self, label: str, cost: int) -> None:
        self.reached += cost
        if self.progress is not None:
            share = (self.clock() - self.started) / (self.end - self.started)  # 0 without an end.
            self.progress(label, max(self.reached, int(share * self.total)), self.total)


class Pace:
    """How long prompts take, from those that ran; `cost` is that of a prompt of a length for a model."""

    def __init__(self, cost: Callable[[str, int], int]) -> None:
        self.cost = cost
        self._rates: dict[tuple[str, int], float] = {}

    def note(self, model: str, lengths: Sequence[int], seconds: float) -> None:
        """Note how long prompts took."""
        if lengths:
            self._rates[model, max(lengths)] = seconds / sum(self.cost(model, length) for length in lengths)

    def seconds(self, model: str, lengths: Sequence[int], unseen: float = _UNSEEN) -> float:
        """How long prompts will take: 0 before any ran, and rather too long for a length that is new to the model."""
        longest = max(lengths, default=0)
        own = [rate for (name, _), rate in self._rates.items() if name == model]
        at_length = [rate for (_, length), rate in self._rates.items() if length == longest]
        rate = self._rates.get((model, longest)) or unseen * max(own or at_length or self._rates.values(), default=0.0)
        return rate * sum(self.cost(model, length) for length in lengths)


def break_even(config: dict[str, Any]) -> float:
    """The length in tokens at which attention scores cost as much as all operations per token."""
    config = config.get("text_config") or config
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    if not hidden or not heads:
        return _USUAL_BREAK_EVEN
    head_dim = config.get("head_dim") or hidden // heads
    key_heads = config.get("num_key_value_heads") or heads
    wide = config.get("intermediate_size") or 4 * hidden
    return float(hidden * (2 * (heads + key_heads) * head_dim + 3 * wide) / (heads * head_dim))


def cost_of(length: int, break_even_length: float) -> int:
    """Return the cost of a prompt of a length, at least 1."""
    return 1 + round(length * (1 + length / break_even_length) / _UNIT)


def in_words(seconds: float) -> str:
    """Return a time in seconds, minutes or hours."""
    if seconds < 2 * _MINUTE:
        return f"{seconds:.0f} s"
    minutes = round(seconds / _MINUTE)
    return f"{minutes} min" if minutes < 2 * _MINUTE else f"{minutes / _MINUTE:.1f} h"


class EvaluationReport(dict[str, Any]):
    """The content of report.json, which a notebook shows as its sentences."""

    def _repr_html_(self) -> str:
        return table(dict(enumerate(findings(self), 1)))


def evaluate(
    models: str | Path | Sequence[str | Path],
    settings: Settings | None = None,
    *,
    loading: "Loading | None" = None,
    out: str | Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
    **options: Any,
) -> Report:
    """Measure whether checkpoints use their context, and what extending it costs.

    Args:
        models: A folder, a Hub id or `demo`; or several.
        settings: Tasks, lengths, depths and samples; without them and without `tasks` those that suit the models.
        loading: How to load the models.
        out: A folder for results, pictures and the report; None writes nothing.
        resume: Continue with the results in `out`.
        overwrite: Replace the results in `out`.
        progress: Called with a label, the work done and the work in all.
        options: Each field of the settings is a keyword of this function too, as samples=50.

    Returns:
        The content of report.json.

    Raises:
        CtxextError: A model, a file or a setting is refused, before anything runs if possible.
    """
    from ctxext.evaluate.model import Loading, load_model

    sources = [str(model) for model in ([models] if isinstance(models, str | Path) else models)]
    if not sources:
        raise CtxextError("There is no model to evaluate: the list is empty.", hint="Name a folder, a Hub id or demo.")
    out, loading = None if out is None else Path(out), loading or Loading()
    if settings is None:
        settings = Settings(**{**options, "tasks": options.get("tasks") or default_tasks(sources, loading)})
    else:
        settings = dataclasses.replace(settings, **options)
    if loading.engine != "transformers":
        from ctxext.evaluate.served import check_tasks

        check_tasks(settings.tasks, settings.harness, loading, processes.num_processes())
        settings = dataclasses.replace(settings, generate=True)
    check_harness(settings.harness)
    plans = plan_questions(sources, settings, loading)
    check_harness(settings.harness, sorted({length for plan in plans for length in plan.lengths}))

    def load(entry: ModelPlan) -> "LoadedModel":
        if loading.engine == "transformers":
            return load_model(entry.info, loading)
        from ctxext.evaluate.served import load_served

        return load_served(entry.info, loading, entry.lengths)

    return Run(plans, settings, loading, load, out, resume, overwrite, progress).report()


@dataclass(frozen=True)
class Run:
    """An evaluation that is planned.

    Attributes:
        plans: The work of each model.
        settings: Tasks, depths and samples.
        loading: How models are loaded.
        load: Loads the model of a plan, from its folder or by applying a recipe in memory.
        out: The folder of results; None keeps them in memory.
        resume: Continue with the results in it.
        overwrite: Replace them.
        progress: Called with a label, the work done and the work in all.
        end: When to stop, on the monotonic clock. All models are then kept loaded and asked in rounds, so that they
            were asked the same, however far the time reaches.
        watches_memory: Whether the most memory that each model takes is recorded.
        complete: Adds to the report what is worked out from the single records.
        first_pace: A number of tokens, and how many seconds the first model took to read them; before it is measured.
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
    watches_memory: bool = False
    complete: "Callable[[Report, Sequence[Record]], None] | None" = None
    first_pace: tuple[int, float] | None = None

    def report(self) -> Report:
        """Ask what is not answered in the folder yet, and write the report; empty in all processes but the first."""
        out, is_first = self.out, processes.rank() == 0
        if out is None and processes.num_processes() > 1:
            raise CtxextError("Several processes need a folder to meet in.", hint="Add --out report.")
        with nullcontext() if out is None else only_run_in(out):
            log = ResultsLog(out, processes.rank())
            header = _header(self.plans, self.settings, self.loading) if is_first else {}
            if is_first:
                log.begin(header, resume=self.resume, overwrite=self.overwrite)
            processes.wait_for_everyone(self.loading.device)
            meter = Meter(self.plans, self.progress, self.settings.samples, end=self.end)
            if math.isinf(self.end):
                for entry in self.plans:
                    self._ask_all(entry, log, meter)
            else:
                self._ask_in_rounds(log, meter)
            processes.wait_for_everyone(self.loading.device)
            if not is_first:
                return {}
            # Only the lines of an earlier run may be other than this one writes them.
            with explain_malformed(str(out)) if self.resume else nullcontext():
                records = log.records()
                report = EvaluationReport(make_report(header, records))
                if log.num_skipped:
                    report["skipped_lines"] = log.num_skipped
                if self.complete is not None:
                    self.complete(report, records)
                if out is not None:
                    write_report(report, out)
                return report

    def _ask_all(self, entry: ModelPlan, log: ResultsLog, meter: Meter) -> None:
        """Run what is left of a model's work in this process."""
        name = entry.info.name
        done = log.done(name)
        needs_harness = bool(self.settings.harness and entry.lengths) and processes.rank() == 0
        needs_harness = needs_harness and not any("harness" in record for record in log.records_of(name))
        if len(done) >= entry.num_samples and not needs_harness:
            meter.skip_plan(entry)
            return
        loaded = self.load(entry)
        try:
            log.append({"model": name, "facts": loaded.facts()})
            meter.begin()
            with self._peak_recorded(loaded, log, {}):
                for number, work in enumerate(entry.make_work(loaded)):
                    if number % processes.num_processes() == processes.rank():
                        _run(loaded, work, done, log, meter)
                    else:
                        meter.skip(name, [key.length for key in work.keys], f"{name} {work.label}")
            if needs_harness:
                from ctxext.evaluate.tasks.harness import run_harness

                metrics = run_harness(loaded, self.settings.harness, entry.lengths, self.settings.samples)
                log.append({"model": name, "harness": metrics})
        finally:
            loaded.close()

    @contextmanager
    def _peak_recorded(self, loaded: "LoadedModel", log: ResultsLog, known: dict[str, int]) -> Iterator[None]:
        """Record the most memory that a model takes meanwhile, where it is more than is known."""
        watches = self.watches_memory and forget_peak(loaded.device)
        yield
        if watches and (peak := peak_memory(loaded.device)) > known.get(loaded.name, 0):
            known[loaded.name] = peak
            log.append({"model": loaded.name, "facts": {"peak_memory": peak}})

    def _ask_in_rounds(self, log: ResultsLog, meter: Meter) -> None:
        """Ask all models a few samples of every cell, shortest first, then more of them, while the time lasts."""
        models = {entry.info.name: self.load(entry) for entry in self.plans}
        done = {name: log.done(name) for name in models}
        for name, loaded in models.items():
            log.append({"model": name, "facts": loaded.facts()})
        meter.begin()
        pace, peaks, first, size = Pace(meter.cost), dict[str, int](), 0, 1
        if self.first_pace is not None:
            tokens, seconds = self.first_pace
            pace.note(self.plans[0].info.name, [tokens], seconds)
        while first < self.settings.samples:
            samples = range(first, min(first + size, self.settings.samples))
            first, size = samples.stop, 2 * size
            works: dict[tuple[int, str], list[tuple[str, Work]]] = {}
            for entry in self.plans:
                for work in entry.make_work(models[entry.info.name], samples):
                    length = max(key.length for key in work.keys)
                    works.setdefault((length, work.label), []).append((entry.info.name, work))
            for _, group in sorted(works.items(), key=lambda item: item[0]):
                costs = [_texts_read(set(work.keys) - done[name], models[name]) for name, work in group]
                names = [name for name, _ in group]
                if time.monotonic() + sum(map(pace.seconds, names, costs)) > self.end:
                    return
                for (name, work), lengths in zip(group, costs, strict=True):
                    began = time.monotonic()
                    if began + pace.seconds(name, lengths) > self.end:
                        return
                    with self._peak_recorded(models[name], log, peaks):
                        _run(models[name], work, done[name], log, meter)
                    pace.note(name, lengths, time.monotonic() - began)


def _texts_read(keys: "set[Key]", loaded: "LoadedModel") -> list[int]:
    """Return the lengths of the texts that are read for some samples: one for all depths if they share a cache."""
    depths = {key._replace(depth=None) for key in keys} if loaded.can_share else keys
    return [key.length for key in depths]


def _header(plans: Sequence[ModelPlan], settings: Settings, loading: "Loading") -> dict[str, Any]:
    from ctxext.evaluate.served import engine_versions

    hidden = ("token", *(("engine", "engine_arguments") if loading.engine == "transformers" else ()))
    options = {key: value for key, value in dataclasses.asdict(loading).items() if key not in hidden}
    if loading.dtype == "auto" and choose_device(loading.device).type == "cpu":
        options["dtype_of_bf16_weights"] = str(fast_cpu_dtype()).removeprefix("torch.")
    return {
        "settings": settings.to_dict(),
        "loading": options,
        "models": [{**entry.info.facts(), "lengths": list(entry.lengths)} for entry in plans],
        "versions": {**versions(), **engine_versions(loading)},
    }


def _run(loaded: "LoadedModel", work: "Work", done: set[Any], log: ResultsLog, meter: Meter) -> None:
    wanted = set(work.keys) - done
    label = f"{loaded.name} {work.label}"
    meter.skip(loaded.name, [key.length for key in work.keys if key in done], label)
    started = time.perf_counter()
    for record in work.run(loaded, wanted):
        seconds, started = round(time.perf_counter() - started, 4), time.perf_counter()
        log.append({"model": loaded.name, **record, "seconds": seconds})
        meter.advance(loaded.name, [record["length"]] * len(record["samples"]), label)
