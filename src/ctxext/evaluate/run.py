"""The whole evaluation, top to bottom: check everything, ask every model, write the report."""

import dataclasses
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ctxext.errors import CtxextError
from ctxext.evaluate.plan import ModelPlan, default_tasks, plan_questions
from ctxext.evaluate.report.report import Report, make_report, versions
from ctxext.evaluate.results_log import ResultsLog
from ctxext.evaluate.settings import Settings
from ctxext.evaluate.tasks.harness import check_harness
from ctxext.system import processes
from ctxext.system.files import Progress
from ctxext.system.loading import choose_device, fast_cpu_dtype
from ctxext.system.locks import locked
from ctxext.verify.engine import vllm_version

if TYPE_CHECKING:
    from ctxext.evaluate.model import LoadedModel, Loading
    from ctxext.evaluate.tasks.base import Work
from collections.abc import Callable

_UNIT = 64
_MINUTE = 60
_LONG = 10 * _MINUTE
_USUAL_BREAK_EVEN = 8192


class Meter:
    """Counts work by what it costs: a token of a long prompt costs more than one of a short prompt.

    Args:
        plans: Everything that is asked.
        progress: Told of every step.
        samples: Of each cell, for the advice.
        clock: Seconds.
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
        self._tell(f"{count:,} prompts and documents of {tokens:,} tokens", 0)

    def cost(self, model: str, length: int) -> int:
        """What one prompt of a length costs a model; never 0."""
        return 1 + round(length * (1 + length / self._break_even[model]) / _UNIT)

    def begin(self) -> None:
        """From now on it is the asking that takes the time, not the loading."""
        self._at = self.clock()

    def skip(self, model: str, lengths: Sequence[int], label: str) -> None:
        """Count prompts that need no asking."""
        self._tell(label, sum(self.cost(model, length) for length in lengths))

    def skip_plan(self, plan: ModelPlan) -> None:
        """Count everything of a model."""
        self._tell(plan.info.name, self._plan_cost(plan))

    def advance(self, model: str, lengths: Sequence[int], label: str) -> None:
        """Count prompts that were asked, and tell how long the rest will take."""
        now = self.clock()
        self._seconds, self._at = self._seconds + now - self._at, now
        cost = sum(self.cost(model, length) for length in lengths)
        self._spent += cost
        left = self._seconds / self._spent * (self.total - self.reached - cost)
        advice = f", half of it with --samples {max(1, self.samples // 2)}" if left >= _LONG else ""
        self._tell(f"{label} ({_in_words(left)} left{advice})", cost)

    def _plan_cost(self, plan: ModelPlan) -> int:
        prompts = len(plan.tasks) * len(plan.settings.depths) * plan.settings.samples
        name = plan.info.name
        documents = sum(self.cost(name, key.length) for work in plan.documents for key in work.keys)
        return documents + prompts * sum(self.cost(name, length) for length in plan.lengths)

    def _tell(self, label: str, cost: int) -> None:
        self.reached += cost
        if self.progress is not None:
            self.progress(label, self.reached, self.total)


def break_even(config: dict[str, Any]) -> float:
    """The length in tokens at which attention's scores cost as much as everything that is done token by token."""
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


def evaluate(
    models: Sequence[str],
    settings: Settings | None = None,
    *,
    loading: "Loading | None" = None,
    out: Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Ask some checkpoints whether they use their context, and what extending it cost.

    Args:
        models: Folders, Hub ids or `demo`.
        settings: What to ask.
        loading: How to load the models.
        out: A folder for results, pictures and the report; None writes nothing.
        resume: Go on with the results in `out`.
        overwrite: Replace the results in `out`.
        progress: Called with what is being run, tokens done and tokens in all.

    Returns:
        The content of report.json.

    Raises:
        CtxextError: a model, a file or a setting is refused; before anything is run, where that can be known.
    """
    from ctxext.evaluate.model import Loading

    loading = loading or Loading()
    settings = settings or Settings(tasks=default_tasks(models, loading))
    if out is None and processes.num_processes() > 1:
        raise CtxextError("Several processes need a folder to meet in.", hint="Add --out report.")
    if loading.engine == "vllm":
        from ctxext.evaluate.served import check_tasks

        check_tasks(settings.tasks, settings.harness, loading, processes.num_processes())
        settings = dataclasses.replace(settings, generate=True)
    check_harness(settings.harness)
    plans = plan_questions(models, settings, loading)
    check_harness(settings.harness, sorted({length for plan in plans for length in plan.lengths}))
    with _only_run_in(out):
        return _evaluate(plans, settings, loading, out, resume=resume, overwrite=overwrite, progress=progress)


def _only_run_in(out: Path | None) -> AbstractContextManager[None]:
    """Two runs must not mix their results; processes of one run are one."""
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
        _ask(entry, settings, loading, log, meter)
    processes.wait_for_everyone(loading.device)
    if processes.rank() != 0:
        return {}
    report = make_report(header, log.records())
    if log.num_skipped:
        report["skipped_lines"] = log.num_skipped
    if out is not None:
        from ctxext.evaluate.report.report import write_report

        write_report(report, out)
    return report


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


def _ask(entry: ModelPlan, settings: Settings, loading: "Loading", log: ResultsLog, meter: Meter) -> None:
    """Run what one model still owes, as far as it falls to this process."""
    name = entry.info.name
    done = log.done(name)
    owes_harness = bool(settings.harness and entry.lengths) and processes.rank() == 0
    owes_harness = owes_harness and not any("harness" in record for record in log.records_of(name))
    if len(done) >= entry.num_samples and not owes_harness:
        meter.skip_plan(entry)
        return
    loaded = _load(entry, loading)
    try:
        _ask_loaded(entry, loaded, settings, log, meter)
        if owes_harness:
            from ctxext.evaluate.tasks.harness import run_harness

            found = run_harness(loaded, settings.harness, entry.lengths, settings.samples)
            log.append({"model": name, "harness": found})
    finally:
        loaded.close()


def _load(entry: ModelPlan, loading: "Loading") -> "LoadedModel":
    if loading.engine == "vllm":
        from ctxext.evaluate.served import load_served

        return load_served(entry.info, loading, entry.lengths)
    from ctxext.evaluate.model import load_model

    return load_model(entry.info, loading)


def _ask_loaded(entry: ModelPlan, loaded: "LoadedModel", settings: Settings, log: ResultsLog, meter: Meter) -> None:
    """Run what falls to this process; `log` knows what was run before."""
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
