"""lm-evaluation-harness, if installed: its tasks run on the loaded model, and the report contains its metrics."""

import contextlib
import importlib.util
import math
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from ctxext.errors import CtxextError
from ctxext.files.offline import forbid_network

if TYPE_CHECKING:
    from ctxext.evaluate.model import LoadedModel

NO_DOWNLOAD = ("niah_single_1", "niah_multikey_2", "niah_multikey_3", "ruler_vt", "ruler_cwe", "ruler_fwe")
"""Tasks of RULER that generate their texts."""

_ESSAYS = ("niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multiquery", "niah_multivalue")
_QUESTIONS = ("ruler_qa_squad", "ruler_qa_hotpot")
ALL = (*NO_DOWNLOAD, *_ESSAYS, *_QUESTIONS)
SETS = {"RULER-6": NO_DOWNLOAD, "RULER-11": (*NO_DOWNLOAD, *_ESSAYS), "RULER-13": ALL}
GROUPS = {"ruler-6": SETS["RULER-6"], "ruler-11": SETS["RULER-11"], "ruler": ALL, "ruler-13": ALL}
"""Groups of tasks by command-line name."""

LENGTHS = (4096, 8192, 16384, 32768, 65536, 131072)
"""Prompt lengths in tokens that the harness supports for RULER."""


def expand_groups(tasks: Iterable[str]) -> tuple[str, ...]:
    """Replace groups by their tasks, without duplicates."""
    return tuple(dict.fromkeys(task for word in tasks for task in GROUPS.get(word, (word,))))


def summary_rows(metrics: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Compute the mean of RULER's tasks at each length, by the name of their set; empty for another set of tasks.

    Args:
        metrics: The metrics of each task; RULER's are named by length in tokens.
    """
    ruler = {task: by_length for task, by_length in metrics.items() if task in ALL}
    name = next((name for name, tasks in SETS.items() if set(tasks) == set(ruler)), None)
    if name is None:
        return {}
    lengths = set.intersection(*(set(by_length) for by_length in ruler.values()))
    means = {
        length: math.fsum(by_length[length] for by_length in ruler.values()) / len(ruler)
        for length in sorted(lengths, key=lambda word: (len(word), word))
    }
    return {name: means} if means else {}


_NOT_RUN = -1
"""The value of RULER's metrics for lengths that were not measured."""


def check_harness(tasks: Sequence[str], lengths: Sequence[int] = ()) -> None:
    """Raise if the harness is not installed, or lacks a task or a length."""
    if not tasks:
        return
    if importlib.util.find_spec("lm_eval") is None:
        raise CtxextError(
            "--harness needs lm-evaluation-harness, which is not installed.", hint='pip install "ctxext[harness]"'
        )
    with forbid_network():
        from lm_eval.tasks import TaskManager

    known = TaskManager().all_tasks
    for task in expand_groups(tasks):
        if task not in known:
            raise CtxextError(f'lm-evaluation-harness has no task "{task}".', hint="List its tasks: lm_eval ls tasks")
    unknown = [length for length in lengths if length not in LENGTHS]
    if unknown and set(expand_groups(tasks)) & set(ALL):
        raise CtxextError(
            f"RULER in lm-evaluation-harness does not support {unknown[0]} tokens.",
            hint=f"Choose --lengths from {', '.join(map(str, LENGTHS))}.",
        )


def run_harness(
    loaded: "LoadedModel", tasks: Sequence[str], lengths: Sequence[int], samples: int
) -> dict[str, dict[str, float]]:
    """Run tasks of the harness.

    Args:
        loaded: The model.
        tasks: Names of tasks or groups of the harness, or `ruler`, `ruler-6` and `ruler-11`.
        lengths: Prompt lengths of RULER's tasks.
        samples: The number of samples of each task, at each length.

    Returns:
        The metrics of each task, and RULER's mean under the name of its set.
    """
    names = expand_groups(tasks)
    results: dict[str, dict[str, float]] = {}
    ruler = [task for task in names if task in ALL]
    others = [task for task in names if task not in ALL]
    # The limit takes the first samples of a list with all lengths, so each length runs separately.
    for length in lengths if ruler else ():
        for task, metrics in _run(loaded, ruler, [length], samples).items():
            results.setdefault(task, {}).update(metrics)
    if others:
        results |= _run(loaded, others, lengths, samples)
    return {**summary_rows(results), **results}


@contextlib.contextmanager
def _explain_harness_errors(tasks: Sequence[str]) -> Iterator[None]:
    try:
        yield
    except (OSError, ImportError) as error:
        raise CtxextError(
            f"lm-evaluation-harness cannot run {', '.join(tasks)}: {str(error).splitlines()[0]}",
            hint="Without a download: --harness ruler-6" if set(tasks) & set(ALL) else "",
        ) from error


def _run(
    loaded: "LoadedModel", tasks: Sequence[str], lengths: Sequence[int], samples: int
) -> dict[str, dict[str, float]]:
    with forbid_network():
        import lm_eval
        from lm_eval.models.huggingface import HFLM
    longest, tokenizer = max(lengths), loaded.encoder.tokenizer
    rows = loaded.rows_that_fit(longest)
    model = HFLM(pretrained=loaded.model, tokenizer=tokenizer, max_length=longest, batch_size=rows)
    # Its tasks load the tokenizer again with its code, so not from the checkpoint.
    with tempfile.TemporaryDirectory() as place, _explain_harness_errors(tasks):
        tokenizer.save_pretrained(place)
        output = lm_eval.simple_evaluate(
            model=model,
            tasks=list(tasks),
            limit=samples,
            metadata={"max_seq_lengths": list(lengths), "tokenizer": place},
            apply_chat_template=loaded.encoder.uses_chat,
            bootstrap_iters=0,
            log_samples=False,
        )
    return {
        task: {
            name.removesuffix(",none"): float(value)
            for name, value in metrics.items()
            if isinstance(value, int | float) and value != _NOT_RUN and "stderr" not in name and name != "sample_len"
        }
        for task, metrics in output["results"].items()
    }
