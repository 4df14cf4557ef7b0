"""Is the answer given? One teacher-forced forward per prompt, with the haystack's cache shared between depths.

Greedy decoding returns an answer if and only if each of its tokens is the arg-max given the ones before, so nothing is
generated. Prompts of one question differ only from their needle on: where the model's encoding allows it, the common
haystack is run once, and for each depth its cache is cropped back to the needle and only the rest is run.
"""

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ctxext.errors import CtxextError
from ctxext.evaluate.model import LoadedModel
from ctxext.evaluate.prompt import Prompt
from ctxext.evaluate.sharing import new_cache

_MAX_MASK = 1 << 28
"""Entries of an attention mask: longer continuations of a cache are run in pieces."""


@torch.inference_mode()
def score_depths(
    loaded: LoadedModel, questions: Sequence[Sequence[Prompt]], wanted: Sequence[int], *, share: bool | None = None
) -> Iterator[tuple[int, list[bool]]]:
    """Score some questions at some depths.

    What is computed for one depth does not hang on which other depths are wanted, so that a run that was broken off and
    resumed gives the same answers to the last bit.

    Args:
        loaded: The model.
        questions: For each question its prompts, one per depth; all of the same length.
        wanted: Which depths to score.
        share: Whether depths share the haystack's cache; by default where the model allows it.

    Yields:
        The number of a depth, and for each question whether it is answered.

    Raises:
        CtxextError: the model returns numbers that are not finite.
    """
    ids = torch.tensor([[prompt.ids for prompt in question] for question in questions], device=loaded.device)
    num_answers = [question[0].num_answer for question in questions]
    num_kept = max(num_answers) + 1
    shared = [min(question[i].num_shared for question in questions) for i in range(len(questions[0]))]
    if not (loaded.can_share if share is None else share) or len(shared) == 1:
        for depth in wanted:
            logits = run(loaded.model, ids[:, depth], num_kept)
            yield depth, are_exact(loaded.name, logits, ids[:, depth], num_answers)
        return
    by_depth = sorted(wanted, key=lambda depth: shared[depth], reverse=True)
    deepest = max(range(len(shared)), key=lambda depth: shared[depth])
    cache = new_cache(loaded.model)
    run(loaded.model, ids[:, deepest, : shared[deepest]], 1, cache)
    for depth in by_depth:
        surplus = cache.get_seq_length() - shared[depth]
        if surplus:
            cache.crop(-surplus)
        logits = run(loaded.model, ids[:, depth, shared[depth] :], num_kept, cache)
        yield depth, are_exact(loaded.name, logits, ids[:, depth], num_answers)


def run(model: Any, ids: torch.Tensor, num_kept: int, cache: Any = None) -> torch.Tensor:
    """The logits after the last tokens of some prompts, of shape (batch, num_kept, vocabulary).

    Args:
        model: A causal language model.
        ids: Tokens of shape (batch, length), without padding.
        num_kept: For how many of the last tokens logits are wanted.
        cache: What stands before them; it grows by these tokens.
    """
    can_keep = "logits_to_keep" in inspect.signature(model.forward).parameters
    options = {"logits_to_keep": num_kept} if can_keep else {}
    if cache is None:
        return _last(model(input_ids=ids, use_cache=False, **options), num_kept)
    start = 0
    for end in _piece_ends(ids.shape[0], ids.shape[1], cache.get_seq_length(), num_kept):
        output = model(input_ids=ids[:, start:end], past_key_values=cache, use_cache=True, **options)
        start = end
    return _last(output, num_kept)


def _piece_ends(batch: int, length: int, before: int, num_kept: int) -> list[int]:
    """Where to cut a continuation so that no mask gets too large; the last piece holds every kept token."""
    if before == 0:
        return [length]
    size = max(num_kept, _MAX_MASK // (batch * (before + length)))
    return list(range(length, 0, -size))[::-1]


def _last(output: Any, num_kept: int) -> torch.Tensor:
    logits: torch.Tensor = output.logits
    return logits[:, -num_kept:]


def are_exact(name: str, logits: torch.Tensor, ids: torch.Tensor, num_answers: Sequence[int]) -> list[bool]:
    """Whether every token of each answer is the arg-max given the ones before.

    Args:
        name: The model, for errors.
        logits: After the last tokens, of shape (batch, kept, vocabulary).
        ids: The prompts, of shape (batch, length), each ending with its answer.
        num_answers: How many tokens each answer has.

    Raises:
        CtxextError: a number is not finite.
    """
    check_finite(name, logits)
    best = logits[:, :-1].argmax(-1)
    return [bool((best[row, -n:] == ids[row, -n:]).all()) for row, n in enumerate(num_answers)]


def check_finite(name: str, numbers: torch.Tensor) -> None:
    """Refuse to score a model whose numbers overflowed.

    Raises:
        CtxextError: a number is not finite.
    """
    # Some families mask unused rows of the vocabulary with minus infinity; only NaN and plus infinity are a failure.
    if bool(numbers.isnan().any() | numbers.isposinf().any()):
        raise CtxextError(
            f'"{name}" returns logits that are not numbers (NaN or infinite).',
            hint="Try --dtype bf16 or --dtype fp32, or check the weights.",
        )
