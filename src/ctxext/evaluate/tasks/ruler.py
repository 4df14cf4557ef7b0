"""RULER's own tasks, as lm-evaluation-harness has them, and the mean of those that were run, by its right name."""

import math
from collections.abc import Iterable, Mapping

NO_DOWNLOAD = ("niah_single_1", "niah_multikey_2", "niah_multikey_3", "ruler_vt", "ruler_cwe", "ruler_fwe")
"""Tasks whose texts are made on the spot."""

_ESSAYS = ("niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multiquery", "niah_multivalue")
_QUESTIONS = ("ruler_qa_squad", "ruler_qa_hotpot")
ALL = (*NO_DOWNLOAD, *_ESSAYS, *_QUESTIONS)
SETS = {"RULER-6": NO_DOWNLOAD, "RULER-11": (*NO_DOWNLOAD, *_ESSAYS), "RULER-13": ALL}
GROUPS = {"ruler-6": SETS["RULER-6"], "ruler-11": SETS["RULER-11"], "ruler": ALL, "ruler-13": ALL}
"""Words of the command line, and the tasks they stand for."""

LENGTHS = (4096, 8192, 16384, 32768, 65536, 131072)
"""Prompt lengths in tokens for which the harness has figures."""


def expanded(tasks: Iterable[str]) -> tuple[str, ...]:
    """The tasks that some words stand for, each once."""
    return tuple(dict.fromkeys(task for word in tasks for task in GROUPS.get(word, (word,))))


def summary_rows(found: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """The mean of RULER's tasks at each length, under the name of the set that was run; empty for any other subset.

    Args:
        found: For each task its metrics; RULER's are named by their length in tokens.
    """
    ran = {task: metrics for task, metrics in found.items() if task in ALL}
    name = next((name for name, tasks in SETS.items() if set(tasks) == set(ran)), None)
    if name is None:
        return {}
    lengths = set.intersection(*(set(metrics) for metrics in ran.values()))
    means = {
        length: math.fsum(metrics[length] for metrics in ran.values()) / len(ran)
        for length in sorted(lengths, key=lambda word: (len(word), word))
    }
    return {name: means} if means else {}
