"""lm-evaluation-harness, where it is installed: its tasks run on our loaded model, its figures go into our report."""

import importlib.util
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ctxext.errors import CtxextError

if TYPE_CHECKING:
    from ctxext.evaluate.model import LoadedModel

_NOT_RUN = -1
"""What RULER's tasks report for lengths that were not asked for."""


def check_harness(tasks: Sequence[str]) -> None:
    """Refuse to begin where the harness is missing or does not know a task.

    Raises:
        CtxextError: it is not installed, or has no such task.
    """
    if not tasks:
        return
    if importlib.util.find_spec("lm_eval") is None:
        raise CtxextError(
            "--harness needs lm-evaluation-harness, which is not installed.", hint='pip install "ctxext[harness]"'
        )
    from lm_eval.tasks import TaskManager

    known = TaskManager().all_tasks
    for task in tasks:
        if task not in known:
            raise CtxextError(f'lm-evaluation-harness has no task "{task}".', hint="lm_eval ls tasks lists them.")


def run_harness(loaded: "LoadedModel", tasks: Sequence[str], lengths: Sequence[int]) -> dict[str, dict[str, float]]:
    """Run some of its tasks, with all of their samples.

    Args:
        loaded: The model.
        tasks: Names that the harness knows.
        lengths: Prompt lengths, for tasks such as RULER's that can be made of any length.

    Returns:
        For each task its metrics.

    Raises:
        CtxextError: a task's data cannot be had.
    """
    import lm_eval
    from lm_eval.models.huggingface import HFLM

    model = HFLM(pretrained=loaded.model, tokenizer=loaded.encoder.tokenizer, max_length=max(lengths), batch_size=1)
    try:
        found = lm_eval.simple_evaluate(
            model=model,
            tasks=list(tasks),
            metadata={"max_seq_lengths": list(lengths), "tokenizer": loaded.encoder.tokenizer.name_or_path},
            apply_chat_template=loaded.encoder.uses_chat,
            bootstrap_iters=0,
            log_samples=False,
        )
    except (OSError, ImportError) as error:
        raise CtxextError(
            f"lm-evaluation-harness cannot run {', '.join(tasks)}: {str(error).splitlines()[0]}"
        ) from error
    return {task: _numbers(metrics) for task, metrics in found["results"].items()}


def _numbers(metrics: dict[str, Any]) -> dict[str, float]:
    kept = {name: value for name, value in metrics.items() if isinstance(value, int | float) and value != _NOT_RUN}
    return {
        name.removesuffix(",none"): float(value)
        for name, value in kept.items()
        if "stderr" not in name and name != "sample_len"
    }
