"""The logits of an answer as in generation: first the prompt, then the answer on the prompt's cache.

If heads are ordered by the prompt, or the schedule depends on the length, one forward over prompt and answer differs
from generation: the answer's last token would decide. If the schedule depends on the length, the answer runs token by
token.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ctxext.checkpoint.loading import quiet_transformers
from ctxext.evaluate.scoring.prefix_cache import follows_length
from ctxext.verify.decoding_process import cache_of

_SHORTEST = [[0]]
"""A prompt of one arbitrary token."""


def run_as_written(model: Any, ids: torch.Tensor, num_answers: Sequence[int], num_kept: int) -> torch.Tensor:
    """The logits from which each answer would be generated, of shape (batch, num_kept, vocabulary).

    They are at the end of each row. Before them, and for the logits after the answer, whose last token is never read,
    there are zeros.

    Args:
        model: A causal language model.
        ids: Prompts of shape (batch, length), without padding, each ending with its answer.
        num_answers: The number of tokens of each answer; answers of the same size run together.
        num_kept: At least one more than the tokens of the longest answer.
    """
    token_by_token = follows_length(model.config.to_dict())
    logits: torch.Tensor | None = None
    for size in sorted(set(num_answers)):
        rows = [row for row, num_answer in enumerate(num_answers) if num_answer == size]
        with quiet_transformers():  # A warning that the prompt alone orders the heads is of no use here.
            answer = _answer_logits(model, ids[rows], size, token_by_token=token_by_token)
        if logits is None:
            logits = answer.new_zeros(len(num_answers), num_kept, answer.shape[-1])
        logits[rows, -size - 1 : -1] = answer
    assert logits is not None
    return logits


def _answer_logits(model: Any, ids: torch.Tensor, size: int, *, token_by_token: bool) -> torch.Tensor:
    from ctxext.evaluate.scoring.exact_match import run

    forget_longer_prompts(model)
    first = model(input_ids=ids[:, :-size], use_cache=True, **_keep_one(model))
    cache, logits = cache_of(first), [first.logits[:, -1:]]
    if size > 1:
        pieces = torch.split(ids[:, -size:-1], 1 if token_by_token else size, dim=1)
        logits += [run(model, piece, piece.shape[1], cache) for piece in pieces]
    return torch.cat(logits, dim=1)


def _keep_one(model: Any) -> Mapping[str, int]:
    import inspect

    return {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}


def forget_longer_prompts(model: Any) -> None:
    """Reset a model to the state in which it was loaded.

    The stock `dynamic` schedule keeps the frequencies of the longest prompt until a short one comes, so that the result
    of a prompt would depend on the prompts before it.
    """
    if follows_length(model.config.to_dict()):
        with torch.no_grad():
            model(input_ids=torch.tensor(_SHORTEST, device=model.device), use_cache=False)
