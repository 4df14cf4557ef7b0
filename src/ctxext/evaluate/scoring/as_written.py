"""An answer's logits as the model has them while it writes: the prompt first, then the answer on the prompt's cache.

Where heads choose by the prompt, or the schedule follows the length, one forward over prompt and answer together is not
what a user gets: the choice would be made by the answer's last token. Which of both it is decides how the answer runs.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ctxext.evaluate.scoring.prefix_cache import follows_length
from ctxext.system.loading import quiet_transformers

_SHORTEST = [[0]]
"""A prompt of one token, whichever it is."""


def run_as_written(model: Any, ids: torch.Tensor, num_answers: Sequence[int], num_kept: int) -> torch.Tensor:
    """The logits from which each answer's tokens would be written, of shape (batch, num_kept, vocabulary).

    They stand at the end of each row, with zeros before them and, in the place of the logits after the answer, behind
    them: the answer's last token is never read.

    Args:
        model: A causal language model.
        ids: Prompts of shape (batch, length), without padding, each ending with its answer.
        num_answers: How many tokens each answer has; prompts with answers of one size run together.
        num_kept: At least one more than the longest answer.
    """
    token_by_token = follows_length(model.config.to_dict())
    logits: torch.Tensor | None = None
    for size in sorted(set(num_answers)):
        rows = [row for row, own in enumerate(num_answers) if own == size]
        with quiet_transformers():  # The prompt has ordered the heads before the answer comes, as it should.
            found = _answer_logits(model, ids[rows], size, token_by_token=token_by_token)
        if logits is None:
            logits = found.new_zeros(len(num_answers), num_kept, found.shape[-1])
        logits[rows, -size - 1 : -1] = found
    assert logits is not None
    return logits


def _answer_logits(model: Any, ids: torch.Tensor, size: int, *, token_by_token: bool) -> torch.Tensor:
    from ctxext.evaluate.scoring.exact_match import run

    forget_longer_prompts(model)
    first = model(input_ids=ids[:, :-size], use_cache=True, **_keep_one(model))
    cache, logits = first.past_key_values, [first.logits[:, -1:]]
    if size > 1:
        pieces = torch.split(ids[:, -size:-1], 1 if token_by_token else size, dim=1)
        logits += [run(model, piece, piece.shape[1], cache) for piece in pieces]
    return torch.cat(logits, dim=1)


def _keep_one(model: Any) -> Mapping[str, int]:
    import inspect

    return {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}


def forget_longer_prompts(model: Any) -> None:
    """Bring a model into the state in which it was loaded.

    The stock `dynamic` schedule keeps the frequencies of the longest prompt it has seen until a short one comes: what
    a prompt gets would hang on what ran before it.
    """
    if follows_length(model.config.to_dict()):
        with torch.no_grad():
            model(input_ids=torch.tensor(_SHORTEST, device=model.device), use_cache=False)
