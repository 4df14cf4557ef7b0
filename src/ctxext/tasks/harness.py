"""lm-evaluation-harness, if installed: its tasks run on the loaded model, and the report contains its metrics."""

import contextlib
import importlib.util
import tempfile
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ctxext.errors import CtxextError
from ctxext.files.offline import forbid_network

if TYPE_CHECKING:
    from ctxext.models.model import LoadedModel

RULER = (
    *("niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2", "niah_multikey_3"),
    *("niah_multiquery", "niah_multivalue", "ruler_vt", "ruler_cwe", "ruler_fwe", "ruler_qa_squad", "ruler_qa_hotpot"),
    "ruler",
)
"""RULER's tasks and their group in the harness."""

LENGTHS = (4096, 8192, 16384, 32768, 65536, 131072)
"""Prompt lengths in tokens that the harness supports for RULER."""

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
    for task in tasks:
        if task not in known:
            raise CtxextError(f'lm-evaluation-harness has no task "{task}".', hint="List its tasks: lm_eval ls tasks")
    unknown = [length for length in lengths if length not in LENGTHS]
    if unknown and set(tasks) & set(RULER):
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
        tasks: Names of tasks or groups of the harness.
        lengths: Prompt lengths of RULER's tasks.
        samples: The number of samples of each task, at each length.

    Returns:
        The metrics of each task.
    """
    results: dict[str, dict[str, float]] = {}
    ruler = [task for task in dict.fromkeys(tasks) if task in RULER]
    others = [task for task in dict.fromkeys(tasks) if task not in RULER]
    # The limit takes the first samples of a list with all lengths, so each length runs separately.
    for length in lengths if ruler else ():
        for task, metrics in _run(loaded, ruler, [length], samples).items():
            results.setdefault(task, {}).update(metrics)
    if others:
        results |= _run(loaded, others, lengths, samples)
    return results


@contextlib.contextmanager
def _explain_harness_errors(tasks: Sequence[str]) -> Iterator[None]:
    try:
        yield
    except (OSError, ImportError) as error:
        raise CtxextError(
            f"lm-evaluation-harness cannot run {', '.join(tasks)}: {str(error).splitlines()[0]}"
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
    # The harness loads the tokenizer again and would run code in the checkpoint, so it gets a copy.
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
