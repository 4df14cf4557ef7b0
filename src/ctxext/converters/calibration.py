"""Measure the order of heads once, on a calibration text, for checkpoints without a state per prompt."""

import dataclasses
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

from ctxext.checkpoint.loading import (
    choose_device,
    explain_loading_errors,
    forbid_downloads,
    guard_vocabulary,
    load_checkpoint,
)
from ctxext.checkpoint.opening import Checkpoint, open_checkpoint
from ctxext.converters.options import ConvertOptions
from ctxext.converters.plan import make_plan
from ctxext.data.encoding import open_tokenizer, tokenize
from ctxext.errors import CtxextError
from ctxext.files import strict
from ctxext.files.content import Progress, report_stage
from ctxext.recipes.code.own_code import CODE_FILES, runs_only_own_code
from ctxext.recipes.code.staging import write_stage
from ctxext.recipes.methods.mspoe import MsPoE, ranks_from_scores
from ctxext.recipes.recipe import Recipe

_NUM_SEQUENCES, _MAX_LENGTH = 2, 512
"""Number of chunks of the calibration text, and of tokens per chunk, at most."""
_LAST_QUERIES, _STEP = 64, 2
"""Number of last queries of a chunk, at most half of it, and the step between those measured: each may end a prompt.

The statistic of one query is noisy and nearly free once the chunk has been read. So many queries of few chunks are more
stable than the last query of 16 long chunks, with 1/13 of the tokens (figures in docs/results/smollm2.md).
"""
_MIN_LENGTH = 16
_CHARACTERS_PER_TOKEN = 64
"""Upper bound of the average characters per token; text beyond it is not tokenized."""
_USUAL_CHARACTERS = 4
"""Characters per token of English text, for an estimate."""


def calibrate_recipe(
    source: Checkpoint, recipe: Recipe, options: ConvertOptions, progress: Progress | None = None
) -> Recipe:
    """Load the model and return the recipe with the measured head order in the steps that need one.

    The statistic of Ms-PoE (`portable/mspoe.py`) is averaged over chunks of the text, and over the last queries of
    each, which are possible ends of a prompt. The head with the highest average score takes the first ratio.
    """
    text, hint = read_text(options.calibration.text), "Try --head-order fixed."
    by_prompt = set_head_order(recipe, "prompt")
    plan = make_plan(source, by_prompt, replace_scaling=options.replace_scaling, allow_shorter=options.allow_shorter)
    device, dtype = choose_device(options.calibration.device), options.calibration.dtype
    report_stage(progress, "loading the model")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "out"
        code = {name: text.encode() for name, text in plan.texts.items() if name in CODE_FILES}
        write_stage(folder, plan.source, plan.model.config, code)
        if not runs_only_own_code(open_checkpoint(str(folder))):
            raise CtxextError(
                "The source contains Python code, which calibration would run.", hint="Use --head-order fixed."
            )
        with forbid_downloads():
            with explain_loading_errors("The model cannot be loaded for calibration", hint):
                tokenizer = open_tokenizer(folder)
            model = load_checkpoint(source, folder, trust=True, dtype=dtype, device=device, hint=hint)
        guard_vocabulary(model, tokenizer)
        scores = head_scores(model, tokenizer, text, plan.encoding.trained_length, progress)
    return order_heads(recipe, scores)


def set_head_order(recipe: Recipe, head_order: str) -> Recipe:
    """Return the recipe with uncalibrated heads in another order: "fixed", or "prompt", which calibration records."""
    return _change_steps(recipe, lambda _: {"head_order": head_order})


def order_heads(recipe: Recipe, scores: dict[int, list[float]]) -> Recipe:
    """Return the recipe with its heads ordered by `scores`, which has one average score per KV head for each layer."""
    return _change_steps(
        recipe, lambda step: {"ranks": tuple(_ranks(scores[layer], step.variant) for layer in sorted(scores))}
    )


def _change_steps(recipe: Recipe, changes: Callable[[MsPoE], dict[str, Any]]) -> Recipe:
    steps = [
        dataclasses.replace(step, **changes(step)) if isinstance(step, MsPoE) and step.needs_calibration else step
        for step in recipe.steps
    ]
    return Recipe(steps, recipe.description, recipe.source)


def _ranks(scores: list[float], variant: str) -> tuple[int, ...]:
    """Return the index of each head's ratio; the variant of the released code uses the head order as these indices."""
    ranks = ranks_from_scores(scores)
    return tuple(ranks) if variant == "paper" else tuple(ranks.index(place) for place in range(len(ranks)))


def read_text(path: Path | None) -> str:
    """Read the calibration text from a text or JSONL file; by default return the text of the package."""
    if path is None:
        return (resources.files("ctxext.converters") / "calibration.txt").read_text(encoding="utf-8")
    content = strict.read_text(path)
    if path.suffix != ".jsonl":
        return content
    return "\n\n".join(_text_of(path, number, line) for number, line in enumerate(content.splitlines(), 1))


def _text_of(path: Path, number: int, line: str) -> str:
    try:
        return str(json.loads(line)["text"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CtxextError(f'Line {number} of "{path}" is not a JSON object with a "text".') from error


def calibrated_lengths(recipe: Recipe, trained_length: int) -> list[int]:
    """Return the approximate number of tokens of each calibration chunk; empty if no step needs calibration."""
    if not recipe.needs_calibration:
        return []
    length = len(read_text(None)) // _USUAL_CHARACTERS // _NUM_SEQUENCES
    return [min(trained_length, _MAX_LENGTH, length)] * _NUM_SEQUENCES


def head_scores(
    model: Any, tokenizer: Any, text: str, trained_length: int, progress: Progress | None = None
) -> dict[int, list[float]]:
    """Return the average share of outliers per KV head, by layer, of an Ms-PoE model that orders heads by each prompt.

    The model, in eval mode, reads the text in chunks of at most `trained_length` tokens, spread over the text.
    """
    import torch

    from ctxext.checkpoint.head import base_of

    stage = f"calibrating the head order ({model.device.type}, {str(model.dtype).removeprefix('torch.')})"
    most = _NUM_SEQUENCES * min(trained_length, _MAX_LENGTH)
    ids = tokenize(tokenizer, text[: _CHARACTERS_PER_TOKEN * most], return_tensors="pt")[0]
    stride = len(ids) // _NUM_SEQUENCES
    length = min(trained_length, _MAX_LENGTH, stride)
    if length < _MIN_LENGTH:
        raise CtxextError(
            f"The calibration text has {len(ids)} tokens; {_NUM_SEQUENCES * _MIN_LENGTH} are needed.",
            hint="Use a longer --calibration-text.",
        )
    with _scores_of(model) as totals, torch.inference_mode():
        for number in range(_NUM_SEQUENCES):
            if progress is not None:
                progress(stage, number, _NUM_SEQUENCES)
            chunk = ids[number * stride : number * stride + length][None].to(model.device)
            base_of(model)(chunk, use_cache=False)
    return {layer: (total / _NUM_SEQUENCES).tolist() for layer, total in totals.items()}


@contextmanager
def _scores_of(model: Any) -> Iterator[dict[int, Any]]:
    """Record the checkpoint's own statistic while it runs; yield a dict from layer to the sum of its scores."""
    import torch

    module: Any = sys.modules[type(model).__module__.rpartition(".")[0] + ".mspoe"]
    original = module.MsPoE.choose
    totals: dict[int, Any] = {}

    def record(method: Any, call: Any, tensors: Any, axis: int) -> Any:
        query, key = (tensor if axis == 1 else tensor.movedim(1, 3) for tensor in tensors)
        length = key.shape[3]
        ends = range(length, length - min(_LAST_QUERIES, length // 2), -_STEP)
        scores = [module.awareness(query[..., :end, :], key[:, :, 0, :end], call.mask, call.scaling) for end in ends]
        totals[call.layer] = totals.get(call.layer, 0) + torch.cat(scores).cpu().double().mean(0)
        return original(method, call, tensors, axis)

    module.MsPoE.choose = record
    try:
        yield totals
    finally:
        module.MsPoE.choose = original
