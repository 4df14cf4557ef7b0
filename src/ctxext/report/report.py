"""The content of report.json, from the records of a run."""

import importlib.metadata
import itertools
import math
import platform
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from ctxext.errors import CtxextError
from ctxext.report.intervals import effective_samples, mean_interval, wilson_interval
from ctxext.tasks.base import Record, list_text_numbers
from ctxext.tasks.registry import GROUPS, TASKS
from ctxext.version import __version__

Report = dict[str, Any]
"""The content of report.json."""

KEPT = 0.85
"""Minimum share of the score at the shortest length, at every length up to the effective one."""

FLOOR = 0.856
"""Minimum score at the shortest length for an effective length: RULER's threshold, arXiv 2404.06654."""

_DRAWS = 2000
_PACKAGES = ("torch", "transformers", "tokenizers")


@contextmanager
def explain_malformed(name: str) -> Iterator[None]:
    """Raise a CtxextError if a value in a report file is missing or has the wrong type."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        fault = f"{type(error).__name__}: {error}"
        raise CtxextError(f'"{name}" is not a report of ctxext eval ({fault}).', hint="Evaluate again.") from error


def effective_lengths(cells: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Compute the effective length over all tasks and of each task; return None for fewer than two lengths.

    The effective length is the longest length up to which a model keeps 85 % of its score at the shortest length, at
    every length in between. There is none if that score is below RULER's threshold of 85.6 %. The score over several
    tasks is the mean of their scores. The interval contains 95 % of the effective lengths of seeded draws, where each
    score comes from its Jeffreys beta distribution, with the effective number of questions of its texts.

    The effective length of a task with a base length is the longest length with 85 % of the base score.
    """
    groups: dict[str, dict[int, list[Mapping[str, Any]]]] = {}
    for cell in cells:
        groups.setdefault(cell["task"], {}).setdefault(cell["length"], []).append(cell)
    counts = {
        task: {length: _weigh_cells(of_length) for length, of_length in by_length.items()}
        for task, by_length in groups.items()
    }
    if len({length for by_length in counts.values() for length in by_length}) < 2:
        return None
    by_task = {}
    for task, by_length in counts.items():
        base_length = getattr(TASKS.get(task), "base_length", 0)
        base = _compute_base(groups[task], base_length) if base_length else None
        by_task[task] = _compute_effective({task: by_length}, base)
    over_all = _compute_effective(counts) if len(by_task) > 1 else next(iter(by_task.values()))
    return {"kept": KEPT, **over_all, "tasks": by_task}


def leaderboard_length(cells: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Compute the effective length of RULER's leaderboard; return None without tasks of RULER.

    It is the longest length up to which the score, the mean over all measured tasks of RULER, is at least 85.6 % at
    every measured length. There is none if it is lower at the shortest one.
    """
    shares: dict[int, dict[str, list[float]]] = {}
    for cell in cells:
        if cell["task"] in GROUPS["ruler"]:
            shares.setdefault(cell["length"], {}).setdefault(cell["task"], []).append(cell["share"])
    tasks = {task for by_task in shares.values() for task in by_task}
    scores = {n: fmean(map(fmean, shares[n].values())) for n in sorted(shares) if shares[n].keys() == tasks}
    passed = [*itertools.takewhile(lambda length: round(scores[length], 9) >= FLOOR, scores)]
    return (
        {"threshold": FLOOR, "tasks": len(tasks), "length": max(passed, default=None), "scores": scores}
        if tasks
        else None
    )


def texts_of(cells: Sequence[Mapping[str, Any]]) -> list[tuple[float, int]]:
    """Count the correct answers and the questions of each text of some cells."""
    counts: dict[tuple[str, int, int], tuple[float, int]] = {}
    for cell in cells:
        for text, correct, samples in cell["texts"]:
            before = counts.get((cell["task"], cell["length"], text), (0, 0))
            counts[cell["task"], cell["length"], text] = before[0] + correct, before[1] + samples
    return [*counts.values()]


def _weigh_cells(cells: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Compute the share of correct answers, and the equivalent number of independent questions."""
    correct, samples = math.fsum(cell["correct"] for cell in cells), sum(cell["samples"] for cell in cells)
    return correct / samples, effective_samples(texts_of(cells))


def _compute_base(by_length: Mapping[int, Sequence[Mapping[str, Any]]], base_length: int) -> float:
    """Compute NoLiMa's base score (section 4.3): the mean over questions of their best score up to a length.

    The shortest length is used if all are longer.
    """
    best: dict[int, float] = {}
    for length in [length for length in by_length if length <= base_length] or [min(by_length)]:
        counts: dict[int, tuple[float, int]] = {}
        for cell in by_length[length]:
            for text, correct, samples in cell["texts"]:
                before = counts.get(text, (0.0, 0))
                counts[text] = before[0] + correct, before[1] + samples
        for text, (correct, samples) in counts.items():
            best[text] = max(best.get(text, 0.0), correct / samples)
    return fmean(best.values())


def _compute_effective(
    counts: Mapping[str, Mapping[int, tuple[float, float]]], base: float | None = None
) -> dict[str, Any]:
    """Compute the effective length with its interval, and the score that it is relative to.

    Args:
        counts: Score and number of questions by task and length.
        base: The base score; None for the score at the shortest length, with no effective length below `FLOOR`.
    """
    tasks = list(counts.values())
    lengths = sorted(set.intersection(*map(set, tasks)))
    by_length = {length: [task[length] for task in tasks] for length in lengths}
    scores = {length: fmean([right for right, _ in of_length]) for length, of_length in by_length.items()}
    if not lengths or not (scores[lengths[0]] if base is None else base):
        return {"length": None, "low": None, "high": None, "figure": 0.0}
    rng = random.Random(0)
    draws = []
    for _ in range(_DRAWS):
        drawn = {
            length: [rng.betavariate(right * worth + 0.5, (1 - right) * worth + 0.5) for right, worth in of_length]
            for length, of_length in by_length.items()
        }
        draws.append(_find_longest({length: fmean(shares) for length, shares in drawn.items()}, base))
    draws.sort(key=lambda length: length or 0)
    low, high = draws[round(0.025 * _DRAWS)], draws[round(0.975 * _DRAWS) - 1]
    figure = scores[lengths[0]] if base is None else base
    return {"length": _find_longest(scores, base), "low": low, "high": high, "figure": figure}


def _find_longest(scores: Mapping[int, float], base: float | None) -> int | None:
    if base is not None:
        return max((length for length, score in scores.items() if score >= KEPT * base), default=None)
    shortest, *others = sorted(scores)
    if scores[shortest] < FLOOR:
        return None
    reached = shortest
    for length in others:
        if scores[length] < KEPT * scores[shortest]:
            break
        reached = length
    return reached


def versions() -> dict[str, str]:
    """Return the versions of all packages that affect scores."""
    return {
        "ctxext": __version__,
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in _PACKAGES},
    }


def make_report(header: Record, records: Sequence[Record]) -> Report:
    """Build the content of report.json from the header of a results log and its records, in any order."""
    models = []
    for model in header["models"]:
        of_model = [record for record in records if record.get("model") == model["name"]]
        facts: Record = next((record["facts"] for record in of_model if "facts" in record), {})
        measured = [record for record in of_model if "task" in record]
        models.append(
            {
                **model,
                **facts,
                "cells": _count_cells(header["settings"], measured),
                "perplexity": _compute_perplexity([record for record in measured if "buckets" in record]),
                "longppl": _compute_key_tokens([record for record in measured if record["task"] == "longppl"]),
                "short": _compute_original_length([record for record in measured if record["task"] == "short"]),
                "harness": next((record["harness"] for record in of_model if "harness" in record), None),
                "seconds": round(math.fsum(record["seconds"] for record in measured), 3),
            }
        )
    for model in models:
        _compare_short(model, models)
        model["effective"] = effective_lengths(model["cells"])
        model["ruler"] = leaderboard_length(model["cells"])
    return {**header, "models": models}


def _count_cells(settings: dict[str, Any], records: Sequence[Record]) -> list[dict[str, Any]]:
    """Count correct answers by task, length and depth."""
    order = {task: number for number, task in enumerate(settings["tasks"])}
    groups: dict[tuple[str, int, float | None], list[Record]] = {}
    for record in records:
        if "correct" in record:
            groups.setdefault((record["task"], record["length"], record["depth"]), []).append(record)
    cells = []
    for task, length, depth in sorted(groups, key=lambda key: (order[key[0]], key[1], key[2] or 0.0)):
        group = groups[task, length, depth]
        answers = {sample: right for r in group for sample, right in zip(r["samples"], r["correct"], strict=True)}
        texts = {sample: text for r in group for sample, text in zip(r["samples"], list_text_numbers(r), strict=True)}
        members = {s: names for r in group if "groups" in r for s, names in zip(r["samples"], r["groups"], strict=True)}
        by_group = {
            name: _count_texts({s: right for s, right in answers.items() if name in members.get(s, ())}, texts)
            for name in getattr(TASKS.get(task), "groups", ())
        }
        correct = sum(right for _, right in sorted(answers.items()))
        low, high = wilson_interval(correct, len(answers))
        read = [count for record in group for count in record.get("read", ())]
        cells.append(
            {
                "task": task,
                "length": length,
                "depth": depth,
                "correct": correct,
                "samples": len(answers),
                "share": correct / len(answers),
                "low": low,
                "high": high,
                "texts": _count_texts(answers, texts),
                **{
                    name: count
                    for name in ("cut", "thought")
                    if (count := sum(sum(record.get(name, ())) for record in group))
                },
                **({"read": [min(read), max(read)]} if read else {}),
                **({"groups": by_group} if by_group else {}),
                "seconds": round(math.fsum(record["seconds"] for record in group), 3),
            }
        )
    return cells


def _count_texts(answers: Mapping[int, float], texts: Mapping[int, int]) -> list[list[float]]:
    """Return the number of each text, with the numbers of its correct answers and of its questions."""
    by_text: dict[int, list[float]] = {}
    for sample, right in sorted(answers.items()):
        by_text.setdefault(texts[sample], []).append(right)
    return [[text, sum(rights), len(rights)] for text, rights in by_text.items()]


def _compute_perplexity(records: Sequence[Record]) -> dict[str, Any] | None:
    """Compute the loss by position over all documents, and by kind of text if there are several."""
    if not records:
        return None
    texts: dict[str, list[Record]] = {}
    for record in records:
        texts.setdefault(record.get("text", ""), []).append(record)
    of_all = _compute_curve(records)
    return {**of_all, "texts": {name: _compute_curve(texts[name]) for name in sorted(texts)}} if any(texts) else of_all


def _compute_curve(records: Sequence[Record]) -> dict[str, Any]:
    """Compute the loss by position over some documents, and the perplexity by length and of sliding windows."""
    records = sorted(records, key=lambda record: (record["task"], record["samples"][0]))
    width = records[0]["width"]
    columns = zip(*(record["buckets"] for record in records), strict=True)
    perplexity: dict[str, Any] = {
        "task": records[0]["task"].partition(": ")[0],
        "documents": len(records),
        "length": records[0]["length"],
        "curve": [
            {"start": number * width, "end": min((number + 1) * width, records[0]["length"]), **_compute_mean(column)}
            for number, column in enumerate(columns)
        ],
        "lengths": {
            length: _compute_mean([record["lengths"][length] for record in records]) for length in records[0]["lengths"]
        },
    }
    if "sliding" in records[0]:
        perplexity["sliding"] = {
            length: _compute_mean([record["sliding"][length] for record in records]) for length in records[0]["sliding"]
        }
    return perplexity


def _compute_mean(sums: Any) -> dict[str, Any]:
    total, count = math.fsum(pair[0] for pair in sums), sum(pair[1] for pair in sums)
    loss = total / max(count, 1)
    return {"loss": loss, "perplexity": math.exp(min(loss, 700.0)), "count": count}


def _compute_key_tokens(records: Sequence[Record]) -> dict[str, Any] | None:
    """Compute the loss on key tokens by length."""
    lengths: dict[int, dict[int, Record]] = {}
    for record in records:
        lengths.setdefault(record["length"], {})[record["samples"][0]] = record
    losses = {}
    for length, by_sample in sorted(lengths.items()):
        mean = _compute_mean([[record["loss"][0], record["key_tokens"][0]] for record in by_sample.values()])
        if not mean["count"]:
            mean |= {"loss": None, "perplexity": None}
        of = sum(record["of"][0] for record in by_sample.values())
        finder = {key: next(iter(by_sample.values())).get(key) for key in ("evaluator", "window")}
        losses[str(length)] = {"documents": len(by_sample), **mean, "of": of, **finder}
    return losses or None


def _compute_original_length(records: Sequence[Record]) -> dict[str, Any] | None:
    """Compute the perplexity at the original context length."""
    records = sorted(records, key=lambda record: record["samples"][0])
    if not records:
        return None
    losses = [record["loss"][0] / record["tokens"][0] for record in records]
    figures = _compute_mean([[record["loss"][0], record["tokens"][0]] for record in records])
    return {"length": records[0]["length"], "documents": len(records), **figures, "losses": losses}


def _compare_short(model: dict[str, Any], models: Sequence[dict[str, Any]]) -> None:
    """Compare a model's loss at the original context length with its source's, paired by document."""
    measured = model["short"]
    if measured is None:
        return
    for candidate in models:
        source = candidate["short"]
        is_source = candidate["name"] == model["source"] and candidate is not model
        if not is_source or not source or len(source["losses"]) != len(measured["losses"]):
            continue
        if source["length"] == measured["length"]:
            pairs = zip(measured["losses"], source["losses"], strict=True)
            mean, half = mean_interval([loss - source_loss for loss, source_loss in pairs])
            low, high = (mean - half, mean + half) if math.isfinite(half) else (None, None)
            difference = {"model": candidate["name"], "loss": mean, "low": low, "high": high}
            measured["against"] = {**difference, "ratio": math.exp(mean)}


@dataclass(frozen=True)
class HeatMap:
    """The scores of one task by model, length and depth, for the page, the pictures and the terminal.

    Attributes:
        task: The name of the task.
        models: The measured models, as in report.json.
        lengths: Prompt lengths in tokens, in ascending order.
        depths: Depths in ascending order; None for tasks without depths.
        cells: Cells of report.json by model name, length and depth.
    """

    task: str
    models: list[dict[str, Any]]
    lengths: list[int]
    depths: list[float | None]
    cells: Mapping[tuple[str, int, float | None], dict[str, Any]]

    def row(self, model: Mapping[str, Any], length: int) -> list[dict[str, Any] | None]:
        """Return the cells of a model at a length, one per depth; None for an unmeasured depth."""
        return [self.cells.get((model["name"], length, depth)) for depth in self.depths]


def tasks_of(report: Report) -> list[str]:
    """Return the measured retrieval tasks, in order."""
    return list(dict.fromkeys(cell["task"] for model in report["models"] for cell in model["cells"]))


def heat_map(models: Sequence[dict[str, Any]], task: str) -> HeatMap:
    """Collect the cells of a task."""
    cells = {
        (model["name"], cell["length"], cell["depth"]): cell
        for model in models
        for cell in model["cells"]
        if cell["task"] == task
    }
    names = {name for name, _, _ in cells}
    return HeatMap(
        task=task,
        models=[model for model in models if model["name"] in names],
        lengths=sorted({length for _, length, _ in cells}),
        depths=sorted({depth for _, _, depth in cells}, key=lambda depth: depth or 0.0),
        cells=cells,
    )
