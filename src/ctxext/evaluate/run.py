"""The evaluation from top to bottom: check everything, run every model, write the report."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ctxext.errors import CtxextError
from ctxext.evaluate.plan import ModelPlan, default_tasks, plan_questions
from ctxext.evaluate.report.findings import findings
from ctxext.evaluate.report.report import Report, make_report, versions, write_report
from ctxext.evaluate.results_log import ResultsLog
from ctxext.evaluate.settings import Settings
from ctxext.evaluate.tasks.harness import check_harness
from ctxext.notebook import table
from ctxext.system import processes
from ctxext.system.files import Progress
from ctxext.system.loading import choose_device, fast_cpu_dtype
from ctxext.system.locks import locked
from ctxext.verify.engine import vllm_version

if TYPE_CHECKING:
    from ctxext.evaluate.model import LoadedModel, Loading
    from ctxext.evaluate.tasks.base import Work

_UNIT = 64
_MINUTE = 60
_LONG = 10 * _MINUTE
_USUAL_BREAK_EVEN = 8192


class Meter:
    """Progress by cost: a token of a long prompt costs more than one of a short prompt.

    Args:
        plans: The work of all models.
        progress: Called at every step.
        samples: The number of samples per cell, for the hint.
        clock: Returns seconds.
    """

    def __init__(
        self,
        plans: Sequence[ModelPlan],
        progress: Progress | None,
        samples: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.progress, self.samples, self.clock = progress, samples, clock
        self._break_even = {plan.info.name: break_even(plan.info.checkpoint.config) for plan in plans}
        self.total = sum(self._plan_cost(plan) for plan in plans)
        self.reached = self._spent = 0
        self._seconds, self._at = 0.0, clock()
        count, tokens = sum(plan.num_samples for plan in plans), sum(plan.num_tokens for plan in plans)
        self._report(f"{count:,} prompts and documents of {tokens:,} tokens", 0)

    def cost(self, model: str, length: int) -> int:
        """The cost of a prompt of a length for a model, at least 1."""
        return 1 + round(length * (1 + length / self._break_even[model]) / _UNIT)

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
        advice = f", half of it with --samples {max(1, self.samples // 2)}" if left >= _LONG else ""
        self._report(f"{label} ({_in_words(left)} left{advice})", cost)

    def _plan_cost(self, plan: ModelPlan) -> int:
        prompts = len(plan.tasks) * len(plan.settings.depths) * plan.settings.samples
        name = plan.info.name
        documents = sum(self.cost(name, key.length) for work in plan.documents for key in work.keys)
        return documents + prompts * sum(self.cost(name, length) for length in plan.lengths)

    def _report(self, label: str, cost: int) -> None:
        self.reached += cost
        if self.progress is not None:
            self.progress(label, self.reached, self.total)


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


def _in_words(seconds: float) -> str:
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
) -> Report:
    """Measure whether checkpoints use their context, and what extending it costs.

    Args:
        models: A folder, a Hub id or `demo`; or several.
        settings: Tasks, lengths, depths and samples.
        loading: How to load the models.
        out: A folder for results, pictures and the report; None writes nothing.
        resume: Continue with the results in `out`.
        overwrite: Replace the results in `out`.
        progress: Called with a label, the work done and the work in all.

    Returns:
        The content of report.json.

    Raises:
        CtxextError: A model, a file or a setting is refused, before anything runs if possible.
    """
    from ctxext.evaluate.model import Loading

    sources = [str(model) for model in ([models] if isinstance(models, str | Path) else models)]
    out, loading = None if out is None else Path(out), loading or Loading()
    settings = settings or Settings(tasks=default_tasks(sources, loading))
    if out is None and processes.num_processes() > 1:
        raise CtxextError("Several processes need a folder to meet in.", hint="Add --out report.")
    if loading.engine == "vllm":
        from ctxext.evaluate.served import check_tasks

        check_tasks(settings.tasks, settings.harness, loading, processes.num_processes())
        settings = dataclasses.replace(settings, generate=True)
    check_harness(settings.harness)
    plans = plan_questions(sources, settings, loading)
    check_harness(settings.harness, sorted({length for plan in plans for length in plan.lengths}))
    with _only_run_in(out):
        return _evaluate(plans, settings, loading, out, resume=resume, overwrite=overwrite, progress=progress)


def _only_run_in(out: Path | None) -> AbstractContextManager[None]:
    """Lock the folder, so that two runs do not mix their results; the processes of one run share the lock."""
    if out is None or processes.rank() != 0:
        return nullcontext()
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CtxextError(f'"{out}" cannot be made: {error.strerror}.', hint="Choose another --out.") from error
    return locked(out)


def _evaluate(
    plans: Sequence[ModelPlan],
    settings: Settings,
    loading: "Loading",
    out: Path | None,
    *,
    resume: bool,
    overwrite: bool,
    progress: Progress | None,
) -> Report:
    log = ResultsLog(out, processes.rank())
    header = _header(plans, settings, loading) if processes.rank() == 0 else {}
    if processes.rank() == 0:
        log.begin(header, resume=resume, overwrite=overwrite)
    processes.wait_for_everyone(loading.device)
    meter = Meter(plans, progress, settings.samples)
    for entry in plans:
        _run_plan(entry, settings, loading, log, meter)
    processes.wait_for_everyone(loading.device)
    if processes.rank() != 0:
        return {}
    report = make_report(header, log.records())
    if log.num_skipped:
        report["skipped_lines"] = log.num_skipped
    if out is not None:
        write_report(report, out)
    return EvaluationReport(report)


def _header(plans: Sequence[ModelPlan], settings: Settings, loading: "Loading") -> dict[str, Any]:
    hidden = ("token", *(("engine", "engine_arguments") if loading.engine == "transformers" else ()))
    options = {key: value for key, value in dataclasses.asdict(loading).items() if key not in hidden}
    if loading.dtype == "auto" and choose_device(loading.device).type == "cpu":
        options["dtype_of_bf16_weights"] = str(fast_cpu_dtype()).removeprefix("torch.")
    return {
        "settings": settings.to_dict(),
        "loading": options,
        "models": [{**entry.info.facts(), "lengths": list(entry.lengths)} for entry in plans],
        "versions": versions() if loading.engine == "transformers" else {**versions(), "vllm": vllm_version()},
    }


def _run_plan(entry: ModelPlan, settings: Settings, loading: "Loading", log: ResultsLog, meter: Meter) -> None:
    """Run what is left of a model's work in this process."""
    name = entry.info.name
    done = log.done(name)
    needs_harness = bool(settings.harness and entry.lengths) and processes.rank() == 0
    needs_harness = needs_harness and not any("harness" in record for record in log.records_of(name))
    if len(done) >= entry.num_samples and not needs_harness:
        meter.skip_plan(entry)
        return
    loaded = _load(entry, loading)
    try:
        _run_loaded(entry, loaded, settings, log, meter)
        if needs_harness:
            from ctxext.evaluate.tasks.harness import run_harness

            metrics = run_harness(loaded, settings.harness, entry.lengths, settings.samples)
            log.append({"model": name, "harness": metrics})
    finally:
        loaded.close()


def _load(entry: ModelPlan, loading: "Loading") -> "LoadedModel":
    if loading.engine == "vllm":
        from ctxext.evaluate.served import load_served

        return load_served(entry.info, loading, entry.lengths)
    from ctxext.evaluate.model import load_model

    return load_model(entry.info, loading)


def _run_loaded(entry: ModelPlan, loaded: "LoadedModel", settings: Settings, log: ResultsLog, meter: Meter) -> None:
    """Run the work of this process, without what is in the log already."""
    name = entry.info.name
    done = log.done(name)
    log.append({"model": name, "facts": loaded.facts()})
    meter.begin()
    for number, work in enumerate(entry.make_work(loaded, settings)):
        if number % processes.num_processes() == processes.rank():
            _run(loaded, work, done, log, meter)
        else:
            meter.skip(name, [key.length for key in work.keys], f"{name} {work.label}")


def _run(loaded: "LoadedModel", work: "Work", done: set[Any], log: ResultsLog, meter: Meter) -> None:
    wanted = set(work.keys) - done
    label = f"{loaded.name} {work.label}"
    meter.skip(loaded.name, [key.length for key in work.keys if key in done], label)
    started = time.perf_counter()
    for record in work.run(loaded, wanted):
        seconds, started = round(time.perf_counter() - started, 4), time.perf_counter()
        log.append({"model": loaded.name, **record, "seconds": seconds})
        meter.advance(loaded.name, [record["length"]] * len(record["samples"]), label)
