"""The part of a model card that comes from report.json: tables with intervals, pictures, and what was not measured."""

import functools
import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ctxext.converters.card import Measured
from ctxext.errors import CtxextError
from ctxext.evaluate.report.findings import effective_text, findings, percent, pooled
from ctxext.evaluate.report.report import Report, explain_malformed
from ctxext.evaluate.settings import Settings
from ctxext.evaluate.tasks.registry import NAMES, RETRIEVAL_TASKS, TASKS, expanded
from ctxext.files.schemas import read_json_object
from ctxext.files.strict import in_markdown
from ctxext.redaction import redacted

_TASK_TYPES = {"masked": "fill-mask", "encoder": "feature-extraction"}
FOLDER = "report"
"""The folder of a report's files inside the repository."""


def retrieval_table(report: Report, entry: Mapping[str, Any], task: str, pictures: Sequence[str]) -> str:
    """Right answers by model and length, pooled over depths, with the weakest depth."""
    rows = []
    for model in report["models"]:
        cells = [cell for cell in model["cells"] if cell["task"] == task]
        for length in sorted({cell["length"] for cell in cells}):
            at_length = [cell for cell in cells if cell["length"] == length]
            share, low, high = pooled(at_length)
            weakest = min(at_length, key=lambda cell: cell["share"])
            is_even = weakest["depth"] is None or all(cell["share"] == share for cell in at_length)
            depth = "" if is_even else f"{percent(weakest['share'])} at depth {round(100 * weakest['depth'])} %"
            name = _name(model, entry)
            rows.append([name, str(length), percent(share), f"{percent(low)}–{percent(high)}", depth])
    head = ["model", "tokens", "% right", "95 % interval", "% right at the weakest depth"]
    return "\n\n".join([f"### {in_markdown(task)}", _table(head, rows), *_picture(f"{task}.png", task, pictures)])


def effective_table(report: Report, entry: Mapping[str, Any]) -> str:
    """The length up to which each model keeps most of its score at the shortest; empty for a single length."""
    effective = {_name(model, entry): model["effective"] for model in report["models"] if model.get("effective")}
    if not effective:
        return ""
    tasks = list(dict.fromkeys(task for lengths_by_task in effective.values() for task in lengths_by_task["tasks"]))
    lengths = [cell["length"] for model in report["models"] for cell in model["cells"]]
    rows = [
        [name, *(effective_text(lengths_by_task["tasks"].get(task), max(lengths)) for task in tasks)]
        for name, lengths_by_task in effective.items()
    ]
    explanation = (
        f"The longest of the measured lengths up to which a model keeps 85 % of its own figure at {min(lengths)} "
        "tokens, with the 95 % interval; none if that is below 85.6 %, the threshold of RULER."
    )
    return f"### effective length\n\n{in_markdown(explanation)}\n\n{_table(['model', *tasks], rows)}"


def perplexity_table(report: Report, entry: Mapping[str, Any], pictures: Sequence[str]) -> str:
    """Perplexity by length; empty where it was not measured."""
    models = [model for model in report["models"] if model["perplexity"]]
    if not models:
        return ""
    lengths = sorted({int(length) for model in models for length in model["perplexity"]["lengths"]})
    rows = []
    for model in models:
        figures = [model["perplexity"]["lengths"].get(str(length)) for length in lengths]
        cells = ["–" if figure is None else f"{figure['perplexity']:.2f}" for figure in figures]
        rows.append([_name(model, entry), *cells])
    task = models[0]["perplexity"].get("task", "perplexity")
    head = [f"{task} over the first", *(f"{length} tokens" for length in lengths)]
    picture = _picture("perplexity.png", "Loss by position", pictures)
    return "\n\n".join([f"### {in_markdown(task)}", _table(head, rows), *picture])


def short_table(report: Report, entry: Mapping[str, Any]) -> str:
    """Perplexity at the original context length, and the difference from the source."""
    rows = []
    for model in report["models"]:
        if model["short"]:
            against = model["short"].get("against") or {}
            change = f"{against['loss']:+z.4f}" if against else ""
            interval = f"{against['low']:+z.4f} to {against['high']:+z.4f}" if against.get("low") is not None else ""
            rows.append([_name(model, entry), f"{model['short']['perplexity']:.3f}", change, interval])
    head = ["model", "perplexity", "nats per token against its source", "95 % interval"]
    return f"### At the original context length\n\n{_table(head, rows)}" if rows else ""


def harness_table(entry: Mapping[str, Any]) -> str:
    """The results of lm-evaluation-harness for this checkpoint."""
    harness = entry.get("harness") or {}
    rows = [[task, metric, f"{value:.4f}"] for task, metrics in harness.items() for metric, value in metrics.items()]
    return f"### lm-evaluation-harness\n\n{_table(['task', 'metric', 'value'], rows)}" if rows else ""


def conditions(report: Report, entry: Mapping[str, Any]) -> str:
    """The conditions of the measurement."""
    settings = report["settings"]
    versions = {key: value for key, value in report["versions"].items() if value}
    answers = "generated" if settings["generate"] else "scored in one forward pass against the right answer"
    engine = f", run by vLLM {versions['vllm']}" if versions.get("vllm") else ""
    return in_markdown(
        f"{settings['samples']} samples per cell, seed {settings['seed']}; answers {answers}; computed in "
        f"{entry.get('dtype')} on {entry.get('device')} with {entry.get('attention')} attention, transformers "
        f"{versions.get('transformers')}, torch {versions.get('torch')}{engine}. Intervals of shares are Wilson's. "
        f"Measured checkpoint: `{entry['digest'][:12]}`. "
        f"Every figure is in [{FOLDER}/report.json]({FOLDER}/report.json)."
    )


def model_index(report: Report, entry: Mapping[str, Any]) -> list[Any]:
    """The figures in the form of the Hub's model index, pooled over depths."""
    from huggingface_hub import EvalResult

    settings, results = report["settings"], []
    common = {"samples": settings["samples"], "seed": settings["seed"]}
    make = functools.partial(EvalResult, task_type=_TASK_TYPES.get(str(entry.get("kind")), "text-generation"))
    for task, length in dict.fromkeys((cell["task"], cell["length"]) for cell in entry["cells"]):
        cells = [cell for cell in entry["cells"] if (cell["task"], cell["length"]) == (task, length)]
        results.append(_result(make, task, length, "exact_match", pooled(cells)[0], {**common, "depths": len(cells)}))
    measured = entry.get("perplexity") or {}
    for length, values in (measured.get("lengths") or {}).items():
        task = measured.get("task", "perplexity")
        results.append(_result(make, task, int(length), "perplexity", values["perplexity"], common))
    if entry.get("short"):
        short = entry["short"]
        results.append(_result(make, "short", short["length"], "perplexity", short["perplexity"], common))
    return results


def _result(make: Any, task: str, length: int, metric: str, value: float, arguments: Mapping[str, Any]) -> Any:
    return make(
        task_name="Long context",
        dataset_type=f"ctxext-{task}",
        dataset_name=f"{task}, {length} tokens",
        dataset_config=str(length),
        dataset_args=dict(arguments),
        metric_type=metric,
        metric_name=metric.replace("_", " "),
        metric_value=round(value, 6),
    )


def _name(model: Mapping[str, Any], entry: Mapping[str, Any]) -> str:
    summary = f"{model['name']} ({model['summary']})"
    return f"**{summary}**" if model["digest"] == entry["digest"] else summary


def _picture(name: str, label: str, pictures: Sequence[str]) -> list[str]:
    """A link to a picture, if the report has one with this name, or with this name and a model."""
    stem = name.removesuffix(".png")
    picture = name if name in pictures else next((other for other in pictures if other.startswith(f"{stem}-")), None)
    return [f"![{in_markdown(label)}]({FOLDER}/{picture})"] if picture else []


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table: text to the left in the first column, figures to the right."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(map(in_markdown, line))} |" for line in lines)


_PICTURE = re.compile(r"[\w.+\-]+\.png")
"""Names of pictures that are safe in a link."""

_NEVER = "Anything else: other languages, following instructions, summaries, code, safety. Those are the source's."


def read_report(folder: Path) -> Report:
    """Read the report.json of an evaluation."""
    path = folder / "report.json"
    if not path.is_file():
        raise CtxextError(
            f'"{folder}" has no report.json.', hint=f"Make one: ctxext eval MODEL --out {shlex.quote(str(folder))}"
        )
    report = read_json_object(path)
    settings, models = report.get("settings"), report.get("models")
    is_report = isinstance(settings, dict) and isinstance(models, list)
    if not is_report or not all(isinstance(model, dict) for model in report["models"]):
        raise CtxextError(f'"{path}" is not a report of ctxext eval.')
    if any(value != value for value in _leaves(report["models"])):
        raise CtxextError(f'"{path}" is not a report of ctxext eval (it contains NaN).', hint="Evaluate again.")
    texts = (value for value in _leaves([report["settings"], report.get("loading")]) if isinstance(value, str))
    if any(redacted(text) != text for text in texts):
        raise CtxextError(
            f'The settings in "{path}" hold a password or a token, which would be published.',
            hint="Change that password, and evaluate again without it.",
        )
    return report


def _leaves(content: Any) -> Iterator[Any]:
    """Yield every text, number, truth and null in a JSON value."""
    if isinstance(content, dict | list):
        for value in content.values() if isinstance(content, dict) else content:
            yield from _leaves(value)
    else:
        yield content


def entry_of(report: Report, digests: Sequence[str]) -> dict[str, Any]:
    """The report's entry for a checkpoint, matched by digest and not by name."""
    for entry in report["models"]:
        if entry.get("digest") in digests:
            return dict(entry)
    names = ", ".join(f'"{entry.get("name")}"' for entry in report["models"])
    raise CtxextError(
        f"The report measured {names}, but not this checkpoint in its present state.",
        hint="Evaluate it again: the card must show results of the files that are shared.",
    )


def files_of(folder: Path, body: str = "") -> list[Path]:
    """The report's files to upload: figures, the page, and the pictures that a card shows."""
    known = [path for path in sorted(folder.iterdir()) if _PICTURE.fullmatch(path.name)]
    known = [path for path in known if not body or path.name in body]
    return [path for name in ("report.json", "report.html") if (path := folder / name).is_file()] + known


def measured(report: Report, entry: Mapping[str, Any], pictures: Sequence[str]) -> Measured:
    """The part of a card that comes from a report, with links to those of its pictures that are uploaded."""
    with explain_malformed("report.json"):
        tasks = dict.fromkeys(cell["task"] for model in report["models"] for cell in model["cells"])
        summary = "\n".join(f"- {in_markdown(sentence)}" for sentence in findings(report))
        parts = [
            f"`{in_markdown(entry['name'])}` is the name under which this checkpoint was measured.\n\n{summary}",
            *(retrieval_table(report, entry, task, pictures) for task in tasks),
            effective_table(report, entry),
            perplexity_table(report, entry, pictures),
            short_table(report, entry),
            harness_table(entry),
            conditions(report, entry),
        ]
        return Measured(
            body="\n\n".join(part for part in parts if part),
            command=_command(report, entry),
            missing=[in_markdown(sentence) for sentence in _missing(report, entry)],
            results=model_index(report, entry),
        )


def _missing(report: Report, entry: Mapping[str, Any]) -> list[str]:
    settings = report["settings"]
    asked = {cell["task"] for cell in entry["cells"]}
    asked |= {task for task in ("short", "longppl") if entry.get(task)}
    asked |= {on_text.get("task", "perplexity")} if (on_text := entry.get("perplexity")) else set()
    lengths = [cell["length"] for cell in entry["cells"]]
    lengths += [int(length) for length in (entry.get("perplexity") or {}).get("lengths", ())]
    reach, claimed = max(lengths, default=0), entry.get("context_length") or 0
    missing = []
    if reach < claimed:
        missing.append(
            f"Beyond {reach} tokens: the context length is {claimed}."
            if reach
            else f"Any length: the context length is {claimed} tokens."
        )
    missing += [
        f"{task.shows[0].upper()}{task.shows[1:]} (`{name}`)."
        for name in NAMES
        if (task := TASKS[expanded([name])[0]])
        and not asked & {*expanded([name])}
        and entry.get("kind", "causal") in task.kinds
    ]
    scored = {name for name, task in RETRIEVAL_TASKS.items() if not task.is_written}
    if asked & scored and not settings["generate"]:
        missing.append("Free generation: the answers were scored, not written by the model.")
    if "needle" in asked and not settings.get("haystack"):
        missing.append(
            "Needles in natural text: they were hidden in prose that the package generates from a small grammar."
        )
    return [*missing, _NEVER]


def _command(report: Report, entry: Mapping[str, Any]) -> str:
    """The `ctxext eval` command that asks the same questions, without options at their defaults."""
    settings, plain = report["settings"], Settings()
    names = ["OUT" if model["name"] == entry["name"] else model["name"] for model in report["models"]]
    words = ["ctxext", "eval", *names, "--task", ",".join(settings["tasks"])]
    if settings.get("lengths"):
        words += ["--lengths", ",".join(map(str, settings["lengths"]))]
    depths = ",".join(f"{100 * depth:g}" for depth in settings["depths"])
    words += ["--depths", depths + ("," if "," not in depths else ""), "--samples", str(settings["samples"])]
    words += ["--seed", str(settings["seed"])]
    named = {"num_needles": "--needles", "kv_ids": "--kv-ids", "stride": "--stride", "haystack": "--haystack"}
    named |= {"data": "--data", "documents": "--documents", "filler": "--filler"}
    for key, option in named.items():
        value = settings.get(key, getattr(plain, key))
        if value != getattr(plain, key):
            words += [option, value["name"] if isinstance(value, dict) else str(value)]
    loading = report.get("loading") or {}
    words += ["--generate"] * bool(settings["generate"] and not loading.get("engine"))
    words += ["--allow-beyond"] * bool(settings.get("allow_beyond"))
    words += ["--repeat-question"] * bool(settings.get("repeat_question"))
    words += ["--harness", ",".join(settings["harness"])] if settings.get("harness") else []
    words += ["--dtype", loading["dtype"]] if loading.get("dtype") not in (None, "auto") else []
    words += ["--engine", loading["engine"]] if loading.get("engine") else []
    words += ["--engine-args", json.dumps(loading["engine_arguments"])] if loading.get("engine_arguments") else []
    return shlex.join([*words, "--out", FOLDER])
