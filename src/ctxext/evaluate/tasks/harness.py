"""lm-evaluation-harness, where it is installed: its tasks run on our loaded model, its figures go into our report."""

import importlib.util
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ctxext.errors import CtxextError
from ctxext.evaluate.tasks import harness as ruler

if TYPE_CHECKING:
    from ctxext.evaluate.model import LoadedModel
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


_NOT_RUN = -1
"""What RULER's tasks report for lengths that were not asked for."""


def check_harness(tasks: Sequence[str], lengths: Sequence[int] = ()) -> None:
    """Refuse to begin where the harness is missing, does not know a task, or has no figure for a length.

    Raises:
        CtxextError: it is not installed, or has no such task or length.
    """
    if not tasks:
        return
    if importlib.util.find_spec("lm_eval") is None:
        raise CtxextError(
            "--harness needs lm-evaluation-harness, which is not installed.", hint='pip install "ctxext[harness]"'
        )
    from lm_eval.tasks import TaskManager

    known = TaskManager().all_tasks
    for task in ruler.expanded(tasks):
        if task not in known:
            raise CtxextError(f'lm-evaluation-harness has no task "{task}".', hint="lm_eval ls tasks lists them.")
    unknown = [length for length in lengths if length not in ruler.LENGTHS]
    if unknown and set(ruler.expanded(tasks)) & set(ruler.ALL):
        raise CtxextError(
            f"RULER in lm-evaluation-harness has no figure for {unknown[0]} tokens.",
            hint=f"Choose --lengths from {', '.join(map(str, ruler.LENGTHS))}.",
        )


def run_harness(
    loaded: "LoadedModel", tasks: Sequence[str], lengths: Sequence[int], samples: int
) -> dict[str, dict[str, float]]:
    """Run some of its tasks.

    Args:
        loaded: The model.
        tasks: Names that the harness knows, or `ruler`, `ruler-6` and `ruler-11` for RULER's.
        lengths: Prompt lengths, for RULER's tasks, which are made of any length.
        samples: How many of each task's samples, at each length.

    Returns:
        For each task its metrics, and RULER's mean under the name of what was run.

    Raises:
        CtxextError: a task's data cannot be had.
    """
    names = ruler.expanded(tasks)
    found: dict[str, dict[str, float]] = {}
    made = [task for task in names if task in ruler.ALL]
    others = [task for task in names if task not in ruler.ALL]
    # The samples of all lengths follow each other in one list, and a limit takes the first: so one length at a time.
    for length in lengths if made else ():
        for task, metrics in _run(loaded, made, [length], samples).items():
            found.setdefault(task, {}).update(metrics)
    if others:
        found |= _run(loaded, others, lengths, samples)
    return {**ruler.summary_rows(found), **found}


def _run(
    loaded: "LoadedModel", tasks: Sequence[str], lengths: Sequence[int], samples: int
) -> dict[str, dict[str, float]]:
    import lm_eval
    from lm_eval.models.huggingface import HFLM

    from ctxext.evaluate.scoring.batch_size import rows_that_fit

    longest = max(lengths)
    rows = rows_that_fit(loaded.model, longest)
    model = HFLM(pretrained=loaded.model, tokenizer=loaded.encoder.tokenizer, max_length=longest, batch_size=rows)
    try:
        found = lm_eval.simple_evaluate(
            model=model,
            tasks=list(tasks),
            limit=samples,
            metadata={"max_seq_lengths": list(lengths), "tokenizer": loaded.encoder.tokenizer.name_or_path},
            apply_chat_template=loaded.encoder.uses_chat,
            bootstrap_iters=0,
            log_samples=False,
        )
    except (OSError, ImportError) as error:
        raise CtxextError(
            f"lm-evaluation-harness cannot run {', '.join(tasks)}: {str(error).splitlines()[0]}",
            hint="--harness ruler-6 needs no download." if set(tasks) & set(ruler.ALL) else "",
        ) from error
    return {task: _numbers(metrics) for task, metrics in found["results"].items()}


def _numbers(metrics: dict[str, Any]) -> dict[str, float]:
    kept = {name: value for name, value in metrics.items() if isinstance(value, int | float) and value != _NOT_RUN}
    return {
        name.removesuffix(",none"): float(value)
        for name, value in kept.items()
        if "stderr" not in name and name != "sample_len"
    }
