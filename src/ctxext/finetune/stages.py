"""Stages of a training run, each with its own window, number of steps, learning rate and share of questions."""

import difflib
import math
from collections.abc import Mapping, Sequence
from typing import Any

from ctxext.errors import CtxextError
from ctxext.files.length import parse_length
from ctxext.files.strict import parse_json

QUESTIONS = "questions"
"""The share of the tokens that come from questions: an option of the data, not of the training."""
STAGED = (
    *("steps", "window", "start_length", "short_share"),
    *("learning_rate", "rate_floor", "warmup", "checkpointing"),
)
"""Options of the training that a stage may have."""
SET_BY_STAGES = "--{found} is set by the stages of the run."
WITHOUT_STAGES = "Remove it, or the stages: --without stages."
"""Error and hint for an option that stages exclude."""
_RESOLVED = "short_length"
"""An option that only resolved stages have."""
_LENGTHS = ("window", "start_length")
_REQUIRED = "steps"
_HINT = """Example: '[{"steps": 60, "window": "2k"}, {"steps": 40, "window": "4k", "learning-rate": 5e-4}]'."""

_WIDTH_EXPONENT = 0.775
"""Exponent of the optimal learning rate of LoRA over the width of Llama models (Schulman et al. 2025, "LoRA Without
Regret", https://thinkingmachines.ai/blog/lora, which finds no effect of the rank)."""
_SMALLEST_WINDOW = 16


def read_stages(value: Any) -> tuple[dict[str, Any], ...]:
    """Read a list of stages, or JSON text of one, with the names of options as on the command line or in Python.

    Raises:
        CtxextError: It is not a list of stages with known options.
    """
    content = parse_json(value, "--stages") if isinstance(value, str) else value
    if not isinstance(content, Sequence) or not all(isinstance(stage, Mapping) for stage in content):
        raise CtxextError("--stages is not a list of stages.", hint=_HINT)
    return tuple(_read_stage(stage) for stage in content)


def _read_stage(stage: Mapping[str, Any]) -> dict[str, Any]:
    known, read = (*STAGED, QUESTIONS, _RESOLVED), dict[str, Any]()
    for word, value in stage.items():
        name = word.replace("-", "_")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f'Did you mean "{near[0]}"?' if near else f"Options of a stage: {', '.join((*STAGED, QUESTIONS))}."
            raise CtxextError(f'Unknown option "{word}" in --stages.', hint=hint.replace("_", "-"))
        if value is not None:
            read[name] = parse_length(value) if name in _LENGTHS and isinstance(value, str) else value
            is_right = isinstance(read[name], int | float) and isinstance(value, bool) == (name == "checkpointing")
            if not is_right:
                raise CtxextError(f'"{value}" is not a value of {word} in --stages.', hint=_HINT)
    if _REQUIRED not in read:
        raise CtxextError(f'A stage has no "{_REQUIRED}".', hint=_HINT)
    return read


def share_steps(stages: Sequence[Mapping[str, Any]], num_steps: int) -> tuple[dict[str, Any], ...]:
    """Return the stages with other numbers of steps, in the same proportion and at least one each."""
    total, shared, before = sum(stage["steps"] for stage in stages), list[dict[str, Any]](), 0
    for number, stage in enumerate(stages, 1):
        upto = round(num_steps * sum(each["steps"] for each in stages[:number]) / total)
        shared.append({**stage, "steps": max(1, upto - before)})
        before += shared[-1]["steps"]
    return tuple(shared)


def resolve_stage(stage: Mapping[str, Any], resolved: Any) -> dict[str, Any]:
    """Return a stage with all its options, from the resolved options of its part of the run."""
    return {**stage, **{name: getattr(resolved, name) for name in (*STAGED, _RESOLVED)}}


def adapt_stage(stage: Mapping[str, Any], sizes: tuple[int, int], ours: tuple[int, int]) -> dict[str, Any]:
    """Adapt a stage to a model of another size.

    A window is the same share of the original context length, but not longer than given: longer ones take more time,
    and skipped positions reach any distance. The learning rate falls with the width.

    Args:
        stage: The options of a stage.
        sizes: Original context length in tokens, and width (0 if unknown), of the model that the stage is for.
        ours: The same of the model to train.
    """
    shorter = min(1.0, ours[0] / sizes[0])
    adapted = {name: max(_SMALLEST_WINDOW, int(stage[name] * shorter)) for name in _LENGTHS if name in stage}
    if "learning_rate" in stage and sizes[1] != ours[1] and 0 not in (sizes[1], ours[1]):
        rate = stage["learning_rate"] * (sizes[1] / ours[1]) ** _WIDTH_EXPONENT
        digits = 1 - math.floor(math.log10(rate))
        adapted["learning_rate"] = round(rate, digits)  # Two digits, as such rates are given.
    return {**stage, **adapted}
