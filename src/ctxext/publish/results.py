"""The results section of a model card, from report.json: tables, pictures, and missing measurements."""

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ctxext.converters.card import CardResults
from ctxext.errors import CtxextError
from ctxext.files.schemas import read_json_object
from ctxext.files.strict import in_markdown
from ctxext.options import flag_of
from ctxext.redaction import redact
from ctxext.report import tables
from ctxext.report.findings import describe_samples, findings, pool_cells
from ctxext.report.forms import describe_form
from ctxext.report.report import Report, explain_malformed, heat_map, tasks_of
from ctxext.tasks.registry import NAMES, RETRIEVAL_TASKS, TASKS, USERS, expand_groups
from ctxext.tasks.settings import Settings

_EVAL_OPTIONS = (*USERS, "prompt", "reason", "no_think", "generate", "allow_beyond", "harness", "original_length")
"""Options of `ctxext eval` that change the questions; the card's command contains them unless they are defaults."""
_TASK_TYPES = {"masked": "fill-mask", "encoder": "feature-extraction"}
_SHORT_COLUMNS = ("model", "perplexity", "change in loss (nats per token)", "95 % interval")
FOLDER = "report"
"""The folder of a report's files inside the repository."""


def _effective_table(report: Report) -> tables.Table:
    """Return the table of effective lengths by task, without that over all tasks."""
    table = tables.tabulate_effective_lengths(report, has_leaderboard=False)
    shortest = min((cell["length"] for model in report["models"] for cell in model["cells"]), default=0)
    note = (
        f"The longest measured length with at least 85 % of the model's score at {shortest} tokens, with the 95 % "
        "interval; none if that score is below 85.6 %, the threshold of RULER."
    )
    return table.select([column for column in table.head if column != "all"], note=note)


def _leaderboard_table(report: Report) -> tables.Table:
    note = (
        "The longest measured length up to which the score in percent, the mean over the tasks, is at least 85.6 at "
        "every length, as on RULER's leaderboard."
    )
    return replace(tables.tabulate_leaderboard(report), note=note)


def _perplexity_table(report: Report) -> tables.Table:
    """Return the table of perplexity over all texts, without sliding windows."""
    table = tables.tabulate_perplexity(report)
    columns = ["model", *(column for column in table.head if column.endswith(" tokens"))]
    of_all_texts = replace(table, rows=[row for row in table.rows if not row[1]])
    return replace(of_all_texts.select(columns), head=[f"{table.title} over the first", *columns[1:]])


def _format_section(table: tables.Table, picture: str = "") -> str:
    """Format a table with its title, its note and its picture; empty if it has no rows."""
    rule = f"| --- |{' ---: |' * (len(table.head) - 1)}"
    parts = [f"### {in_markdown(table.title)}", in_markdown(table.note), table.as_markdown(rule), picture]
    return "\n\n".join(part for part in parts if part) if table.rows else ""


def _link_picture(stem: str, label: str, pictures: Sequence[str]) -> str:
    """Return a link to the picture with this name, with or without a model; empty if the report has none."""
    names = [name for name in pictures if name == f"{stem}.png"]
    names += [name for name in pictures if name.startswith(f"{stem}-")]
    return f"![{in_markdown(label)}]({FOLDER}/{names[0]})" if names else ""


def conditions(report: Report, entry: Mapping[str, Any]) -> str:
    """Return a description of the measurement's conditions."""
    settings = report["settings"]
    versions = {key: value for key, value in report["versions"].items() if value}
    answers = "generated" if settings["generate"] else "scored in one forward pass against the correct answer"
    forms = {describe_form([entry], task) for task in entry.get("forms") or ()} - {""}
    answers += "".join(f". {form.removesuffix('.')}" for form in sorted(forms))
    engine = f", run by vLLM {versions['vllm']}" if versions.get("vllm") else ""
    if "served_model" in entry:
        computed = f"computed by {versions['server']}, which served {entry['served_model'] or 'its default model'}"
    else:
        computed = f"computed in {entry.get('dtype')} on {entry.get('device')} with {entry.get('attention')} attention"
    return in_markdown(
        f"{describe_samples(report)}, seed {settings['seed']}; answers {answers}; "
        f"{computed}, transformers {versions.get('transformers')}, torch {versions.get('torch')}{engine}. "
        f"Shares have Wilson intervals. Measured checkpoint: `{entry['digest'][:12]}`. "
        f"All figures: [{FOLDER}/report.json]({FOLDER}/report.json)."
    )


def model_index(report: Report, entry: Mapping[str, Any]) -> list[Any]:
    """Return the figures for the Hub's model index, pooled over depths."""
    from huggingface_hub import EvalResult

    figures: list[tuple[str, Any, str, float, dict[str, int]]] = []
    for task, length in dict.fromkeys((cell["task"], cell["length"]) for cell in entry["cells"]):
        cells = [cell for cell in entry["cells"] if (cell["task"], cell["length"]) == (task, length)]
        measured = {"samples": min(cell["samples"] for cell in cells), "depths": len(cells)}
        figures.append((task, length, "exact_match", pool_cells(cells)[0], measured))
    losses, short_loss = entry.get("perplexity") or {}, entry.get("short")
    for length, values in (losses.get("lengths") or {}).items():
        figures.append((losses.get("task", "perplexity"), int(length), "perplexity", values["perplexity"], {}))
    if short_loss:
        documents = {"samples": short_loss["documents"]}
        figures.append(("short", short_loss["length"], "perplexity", short_loss["perplexity"], documents))
    settings = {name: report["settings"][name] for name in ("samples", "seed")}
    return [
        EvalResult(
            task_type=_TASK_TYPES.get(str(entry.get("kind")), "text-generation"),
            task_name="Long context",
            dataset_type=f"ctxext-{task}",
            dataset_name=f"{task}, {length} tokens",
            dataset_config=str(length),
            dataset_args={**settings, **more},
            metric_type=metric,
            metric_name=metric.replace("_", " "),
            metric_value=round(value, 6),
        )
        for task, length, metric, value, more in figures
    ]


_PICTURE = re.compile(r"[\w.+\-]+\.png")
"""Picture names that are safe in a link."""

_NEVER = "Other languages, instruction following, summarization, code and safety: see the source model."


def read_report(folder: Path) -> Report:
    """Read the report.json of an evaluation."""
    path = folder / "report.json"
    if not path.is_file():
        raise CtxextError(
            f'"{folder}" has no report.json.', hint=f"Create one: ctxext eval MODEL --out {shlex.quote(str(folder))}"
        )
    report = read_json_object(path)
    settings, models = report.get("settings"), report.get("models")
    is_report = isinstance(settings, dict) and isinstance(models, list)
    if not is_report or not all(isinstance(model, dict) for model in report["models"]):
        raise CtxextError(f'"{path}" is not a report of ctxext eval.')
    if any(value != value for value in _leaves(report["models"])):
        raise CtxextError(f'"{path}" is not a report of ctxext eval (it contains NaN).', hint="Evaluate again.")
    texts = (value for value in _leaves([report["settings"], report.get("loading")]) if isinstance(value, str))
    if any(redact(text) != text for text in texts):
        raise CtxextError(
            f'The settings in "{path}" contain a password or a token, which would be published.',
            hint="Change the password, and evaluate again without it.",
        )
    return report


def _leaves(content: Any) -> Iterator[Any]:
    """Yield every text, number, boolean and null in a JSON value."""
    if isinstance(content, dict | list):
        for value in content.values() if isinstance(content, dict) else content:
            yield from _leaves(value)
    else:
        yield content


def entry_of(report: Report, digests: Sequence[str]) -> dict[str, Any]:
    """Return the report's entry for a checkpoint, matched by digest and not by name; raise if there is none."""
    for entry in report["models"]:
        if entry.get("digest") in digests:
            return dict(entry)
    names = ", ".join(f'"{entry.get("name")}"' for entry in report["models"])
    raise CtxextError(
        f"The report contains {names}, but not this checkpoint in its current state.",
        hint="Evaluate the checkpoint again.",
    )


def files_of(folder: Path, body: str = "") -> list[Path]:
    """Return the report's files to upload: figures, the page, and the pictures that a card contains."""
    known = [path for path in sorted(folder.iterdir()) if _PICTURE.fullmatch(path.name)]
    known = [path for path in known if not body or path.name in body]
    return [path for name in ("report.json", "report.html") if (path := folder / name).is_file()] + known


def build_results(report: Report, entry: Mapping[str, Any], pictures: Sequence[str]) -> CardResults:
    """Return the results section of a card, from a report, with links to its uploaded pictures."""
    with explain_malformed("report.json"):
        summary = "\n".join(f"- {in_markdown(sentence)}" for sentence in findings(report))
        labelled = {**report, "models": [_label_model(model, entry) for model in report["models"]]}
        short, harness = tables.tabulate_original_length(labelled), tables.tabulate_harness([entry])
        parts = [
            f"In the report, this checkpoint is named `{in_markdown(entry['name'])}`.\n\n{summary}",
            *(
                _format_section(
                    tables.tabulate_retrieval(heat_map(labelled["models"], task)), _link_picture(task, task, pictures)
                )
                for task in tasks_of(report)
            ),
            _format_section(_effective_table(labelled)),
            _format_section(_leaderboard_table(labelled)),
            _format_section(_perplexity_table(labelled), _link_picture("perplexity", "Loss by position", pictures)),
            _format_section(short.select(_SHORT_COLUMNS, "At the original context length")),
            _format_section(harness.select(("task", "metric", "value"), "lm-evaluation-harness")),
            conditions(report, entry),
        ]
        return CardResults(
            body="\n\n".join(part for part in parts if part),
            command=_command(report, entry),
            missing=[in_markdown(sentence) for sentence in _missing(report, entry)],
            results=model_index(report, entry),
        )


def _label_model(model: Mapping[str, Any], entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model with its name and recipe as label, in bold if it is the card's model."""
    name = f"{model['name']} ({model['summary']})"
    return {**model, "name": f"**{name}**" if model["digest"] == entry["digest"] else name}


def _missing(report: Report, entry: Mapping[str, Any]) -> list[str]:
    settings = report["settings"]
    tasks = {cell["task"] for cell in entry["cells"]}
    tasks |= {task for task in ("short", "longppl") if entry.get(task)}
    tasks |= {on_text.get("task", "perplexity")} if (on_text := entry.get("perplexity")) else set()
    lengths = [cell["length"] for cell in entry["cells"]]
    lengths += [int(length) for length in (entry.get("perplexity") or {}).get("lengths", ())]
    longest, context_length = max(lengths, default=0), entry.get("context_length") or 0
    missing = []
    if longest < context_length:
        missing.append(
            f"Lengths beyond {longest} tokens; the context length is {context_length}."
            if longest
            else f"All lengths; the context length is {context_length} tokens."
        )
    missing += [
        f"{task.shows[0].upper()}{task.shows[1:]} (`{name}`)."
        for name in NAMES
        if (task := TASKS[expand_groups([name])[0]])
        and not tasks & {*expand_groups([name])}
        and entry.get("kind", "causal") in task.kinds
    ]
    scored = {name for name, task in RETRIEVAL_TASKS.items() if not task.is_written} - {*(entry.get("forms") or ())}
    if tasks & scored and not settings["generate"]:
        missing.append("Free generation: the answers were scored, not generated.")
    if "needle" in tasks and not settings.get("haystack"):
        missing.append("Needles in natural text: the text was generated from a small grammar.")
    return [*missing, _NEVER]


def command_of(words: Sequence[str], options: Mapping[str, Any]) -> str:
    """Return a command with its options. None and False are omitted, and True adds only the name."""
    for name, value in options.items():
        if value is True:
            words = [*words, name]
        elif isinstance(value, list):
            words = [*words, name, ",".join(map(str, value))]
        elif value is not None and value is not False:
            words = [*words, name, f"{value:g}" if isinstance(value, float) else str(value)]
    return shlex.join(words)


def _command(report: Report, entry: Mapping[str, Any]) -> str:
    """Return the `ctxext eval` command that repeats the measurement, without options at their defaults."""
    settings, loading = report["settings"], report.get("loading") or {}
    names = ["OUT" if model["name"] == entry["name"] else model["name"] for model in report["models"]]
    depths = ",".join(f"{100 * depth:g}" for depth in settings["depths"])
    options = {
        "--task": settings["tasks"],
        "--lengths": settings.get("lengths") or None,
        "--depths": depths + ("," if "," not in depths else ""),
        "--samples": settings["samples"],
        "--seed": settings["seed"],
    }
    for name in _EVAL_OPTIONS:
        if (value := settings.get(name)) not in (None, [], getattr(Settings, name)):
            flag = flag_of(Settings, name)
            options[flag] = value["name"] if isinstance(value, dict) else value
    options["--dtype"] = loading.get("dtype") if loading.get("dtype") != "auto" else None
    if loading.get("engine"):
        arguments = loading.get("engine_arguments")
        is_served = "served_model" in loading
        options |= {"--generate": None, **({"--server": "URL"} if is_served else {"--engine": loading["engine"]})}
        options["--engine-args"] = json.dumps(arguments) if arguments else None
    return command_of(["ctxext", "eval", *names], {**options, "--out": FOLDER})
