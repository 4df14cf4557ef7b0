"""The whole evaluation, top to bottom: check everything, ask every model, write the report."""

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ctxext.errors import CtxextError
from ctxext.evaluate import processes
from ctxext.evaluate.plan import ModelPlan, plan_questions
from ctxext.evaluate.report.report import Report, make_report, versions
from ctxext.evaluate.results_log import ResultsLog
from ctxext.evaluate.settings import Settings
from ctxext.evaluate.tasks.harness import check_harness
from ctxext.files import Progress

if TYPE_CHECKING:
    from ctxext.evaluate.model import LoadedModel, Loading
    from ctxext.evaluate.tasks.base import Work


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

    settings, loading = settings or Settings(), loading or Loading()
    if out is None and processes.num_processes() > 1:
        raise CtxextError("Several processes need a folder to meet in.", hint="Add --out report.")
    check_harness(settings.harness)
    plans = plan_questions(models, settings, loading)
    log = ResultsLog(out, processes.rank())
    header = _header(plans, settings, loading) if processes.rank() == 0 else {}
    if processes.rank() == 0:
        log.begin(header, resume=resume, overwrite=overwrite)
    processes.wait_for_everyone(loading.device)
    meter = _Meter(plans, progress)
    for entry in plans:
        _ask(entry, settings, loading, log, meter)
    processes.wait_for_everyone(loading.device)
    if processes.rank() != 0:
        return {}
    report = make_report(header, log.records())
    if out is not None:
        from ctxext.evaluate.report.write_report import write_report

        write_report(report, out)
    return report


def _header(plans: Sequence[ModelPlan], settings: Settings, loading: "Loading") -> dict[str, Any]:
    options = {key: value for key, value in dataclasses.asdict(loading).items() if key != "token"}
    return {
        "settings": settings.to_dict(),
        "loading": options,
        "models": [{**entry.info.facts(), "lengths": list(entry.lengths)} for entry in plans],
        "versions": versions(),
    }


class _Meter:
    """Progress in tokens: long prompts take longer than short ones."""

    def __init__(self, plans: Sequence[ModelPlan], progress: Progress | None) -> None:
        self.total, self.reached, self.progress = sum(entry.num_tokens for entry in plans), 0, progress

    def advance(self, tokens: int, label: str) -> None:
        self.reached += tokens
        if self.progress is not None:
            self.progress(label, self.reached, self.total)


def _ask(entry: ModelPlan, settings: Settings, loading: "Loading", log: ResultsLog, meter: _Meter) -> None:
    """Run what one model still owes, as far as it falls to this process."""
    from ctxext.evaluate.model import load_model

    name = entry.info.name
    done = log.done(name)
    owes_harness = bool(settings.harness and entry.lengths) and processes.rank() == 0
    owes_harness = owes_harness and not any("harness" in record for record in log.records_of(name))
    if len(done) >= entry.num_samples and not owes_harness:
        meter.advance(entry.num_tokens, name)
        return
    loaded = load_model(entry.info, loading)
    log.append({"model": name, "facts": loaded.facts()})
    for number, work in enumerate(entry.make_work(loaded, settings)):
        if number % processes.num_processes() == processes.rank():
            _run(loaded, work, done, log, meter)
        else:
            meter.advance(sum(key.length for key in work.keys), f"{name} {work.label}")
    if owes_harness:
        from ctxext.evaluate.tasks.harness import run_harness

        log.append({"model": name, "harness": run_harness(loaded, settings.harness, entry.lengths)})


def _run(loaded: "LoadedModel", work: "Work", done: set[Any], log: ResultsLog, meter: _Meter) -> None:
    wanted = set(work.keys) - done
    label = f"{loaded.name} {work.label}"
    meter.advance(sum(key.length for key in work.keys if key in done), label)
    started = time.perf_counter()
    for record in work.run(loaded, wanted):
        seconds, started = round(time.perf_counter() - started, 4), time.perf_counter()
        log.append({"model": loaded.name, **record, "seconds": seconds})
        meter.advance(record["length"] * len(record["samples"]), label)
