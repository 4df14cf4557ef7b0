"""From report.json to what a model card shows: tables with intervals, pictures, and what was not measured."""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ctxext.checkpoint import read_json_object
from ctxext.converters.card import Measured
from ctxext.errors import CtxextError
from ctxext.evaluate.report.findings import findings
from ctxext.evaluate.report.report import Report
from ctxext.evaluate.settings import Settings
from ctxext.evaluate.tasks.registry import RETRIEVAL_TASKS, TASKS
from ctxext.publish.result_tables import (
    FOLDER,
    conditions,
    effective_table,
    harness_table,
    model_index,
    perplexity_table,
    retrieval_table,
    short_table,
)
from ctxext.reading import checked
from ctxext.reading import report as schemas

_PICTURE = re.compile(r"[\w.+\-]+\.png")
"""A picture's name that may stand in a link."""

_NEVER = "Anything else: other languages, following instructions, summaries, code, safety. Those are the source's."


def read_report(folder: Path) -> Report:
    """Read the report.json of an evaluation.

    Raises:
        CtxextError: there is none, or it is not one of ours.
    """
    path = folder / "report.json"
    if not path.is_file():
        raise CtxextError(
            f'"{folder}" has no report.json.', hint=f"Make one: ctxext eval MODEL --out {shlex.quote(str(folder))}"
        )
    report = read_json_object(path)
    if not all(isinstance(report.get(key), kind) for key, kind in (("settings", dict), ("models", list))):
        raise CtxextError(f'"{path}" is not a report of ctxext eval.')
    checked(report, schemas.Report, str(path))
    return report


def entry_of(report: Report, digests: Sequence[str]) -> dict[str, Any]:
    """The report's entry for a checkpoint, found by what was measured and not by what it was called.

    Raises:
        CtxextError: the report is about other checkpoints, or about this one before it was changed.
    """
    for entry in report["models"]:
        if entry.get("digest") in digests:
            return dict(entry)
    names = ", ".join(f'"{entry.get("name")}"' for entry in report["models"])
    raise CtxextError(
        f"The report measured {names}, but none of them as this checkpoint stands now.",
        hint="Evaluate it again: what is shown on the card must be what is shared.",
    )


def files_of(folder: Path, body: str = "") -> list[Path]:
    """The report's files that go along: figures, the page, and the pictures that a card shows."""
    known = [path for path in sorted(folder.iterdir()) if _PICTURE.fullmatch(path.name)]
    known = [path for path in known if not body or path.name in body]
    return [path for name in ("report.json", "report.html") if (path := folder / name).is_file()] + known


def measured(report: Report, entry: Mapping[str, Any], pictures: Sequence[str]) -> Measured:
    """What a card shows of a report.

    Args:
        report: The content of report.json.
        entry: This checkpoint's part of it.
        pictures: Names of the report's files that go along.
    """
    tasks = dict.fromkeys(cell["task"] for model in report["models"] for cell in model["cells"])
    said = "\n".join(f"- {sentence}" for sentence in findings(report))
    called = f"`{entry['name']}` is the name under which this checkpoint was measured."
    parts = [f"{called}\n\n{said}", *(retrieval_table(report, entry, task, pictures) for task in tasks)]
    parts.append(effective_table(report, entry))
    parts += [
        perplexity_table(report, entry, pictures),
        short_table(report, entry),
        harness_table(entry),
        conditions(report, entry),
    ]
    return Measured(
        body="\n\n".join(part for part in parts if part),
        command=_command(report, entry),
        missing=_missing(report, entry),
        results=model_index(report, entry),
    )


def _missing(report: Report, entry: Mapping[str, Any]) -> list[str]:
    settings = report["settings"]
    asked = {cell["task"] for cell in entry["cells"]}
    asked |= {"short"} if entry.get("short") else set()
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
        for name, task in TASKS.items()
        if name not in asked and entry.get("kind", "causal") in task.kinds
    ]
    scored = {name for name, task in RETRIEVAL_TASKS.items() if not task.is_written}
    if asked & scored and not settings["generate"]:
        missing.append("Free generation: the answers were scored, not written by the model.")
    if "needle" in asked and not settings.get("haystack"):
        missing.append("Needles in natural text: they stood in prose that the package makes up from a small grammar.")
    return [*missing, _NEVER]


def _command(report: Report, entry: Mapping[str, Any]) -> str:
    """The `ctxext eval` line that asks the same questions; what is as by default is left out."""
    settings, plain = report["settings"], Settings()
    names = ["OUT" if model["name"] == entry["name"] else model["name"] for model in report["models"]]
    words = ["ctxext", "eval", *names, "--task", ",".join(settings["tasks"])]
    if settings.get("lengths"):
        words += ["--lengths", ",".join(map(str, settings["lengths"]))]
    depths = ",".join(f"{100 * depth:g}" for depth in settings["depths"])
    words += ["--depths", depths + ("," if "," not in depths else ""), "--samples", str(settings["samples"])]
    words += ["--seed", str(settings["seed"])]
    named = {"num_needles": "--needles", "kv_ids": "--kv-ids", "stride": "--stride", "haystack": "--haystack"}
    named |= {"data": "--data", "documents": "--documents"}
    for key, option in named.items():
        value = settings.get(key, getattr(plain, key))
        if value != getattr(plain, key):
            words += [option, value["name"] if isinstance(value, dict) else str(value)]
    loading = report.get("loading") or {}
    words += ["--generate"] * bool(settings["generate"] and not loading.get("engine"))
    words += ["--allow-beyond"] * bool(settings.get("allow_beyond"))
    words += ["--harness", ",".join(settings["harness"])] if settings.get("harness") else []
    words += ["--dtype", loading["dtype"]] if loading.get("dtype") not in (None, "auto") else []
    words += ["--engine", loading["engine"]] if loading.get("engine") else []
    words += ["--engine-args", json.dumps(loading["engine_arguments"])] if loading.get("engine_arguments") else []
    return shlex.join([*words, "--out", FOLDER])
