"""The loss of every token of a long text, without logits of shape length × vocabulary (`checkpoint/head.py`).

A masked language model's tokens are masked to be predicted. Masking one token at a time (Salazar et al. 2020, arXiv
1910.14659) takes as many passes as there are tokens. Here every eighth token is masked, so that eight passes predict
each token once, with nearly as many masks as in training.
"""

from collections.abc import Sequence

import torch

from ctxext.checkpoint.head import positions_at_once
from ctxext.errors import CtxextError
from ctxext.evaluate.model import LoadedModel
from ctxext.evaluate.scoring.batch_size import rows_that_fit
from ctxext.evaluate.scoring.exact_match import check_finite
from ctxext.evaluate.scoring.prefix_cache import forget_longer_prompts

EVERY = 8
"""The distance between masked tokens, and the number of passes."""


def losses_of(loaded: LoadedModel, ids: Sequence[int]) -> torch.Tensor:
    """The losses of a text's tokens: given the tokens before, or masked for a masked language model.

    Args:
        loaded: A causal or masked language model.
        ids: The tokens of one text, special tokens included.
    """
    if loaded.kind != "masked":
        return token_losses(loaded, torch.tensor([list(ids)], device=loaded.device))[0]
    losses, is_guessed = masked_losses(loaded, ids)
    return losses[is_guessed]


@torch.inference_mode()
def token_losses(loaded: LoadedModel, ids: torch.Tensor, *, last: int | None = None) -> torch.Tensor:
    """The loss in nats of predicting each token from those before it.

    Args:
        loaded: The model.
        ids: Tokens of shape (batch, length), without padding.
        last: How many of the last tokens to return the loss of; by default all but the first.

    Returns:
        Losses in float64 on the CPU, of shape (batch, last).
    """
    forget_longer_prompts(loaded.model)
    last = last or ids.shape[1] - 1
    is_read = torch.zeros_like(ids, dtype=torch.bool)
    is_read[:, -last - 1 : -1] = True
    return _losses_at(loaded, ids, is_read, ids[:, -last:].flatten()).view(len(ids), last)


@torch.inference_mode()
def masked_losses(loaded: LoadedModel, ids: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss in nats of predicting each token while every eighth token is masked, this one included.

    Args:
        loaded: A masked language model.
        ids: The tokens of one text, special tokens included.

    Returns:
        Losses in float64 on the CPU, of shape (length,), and which tokens were predicted: all but special tokens.
    """
    tokenizer = loaded.encoder.tokenizer
    if tokenizer.mask_token_id is None:
        raise CtxextError(f'The tokenizer of "{loaded.name}" has no mask token.')
    text = torch.tensor(list(ids))
    is_guessed = ~torch.isin(text, torch.tensor(sorted(tokenizer.all_special_ids)))
    places = is_guessed.nonzero()[:, 0]
    is_masked = torch.zeros(min(EVERY, max(1, len(places))), len(text), dtype=torch.bool)
    for number in range(len(is_masked)):
        is_masked[number, places[number::EVERY]] = True
    losses = torch.zeros(len(text), dtype=torch.float64)
    for chosen in torch.split(is_masked, rows_that_fit(loaded.model, len(text))):
        seen, targets = torch.where(chosen, tokenizer.mask_token_id, text), text.expand_as(chosen)[chosen]
        loss = _losses_at(loaded, *(tensor.to(loaded.device) for tensor in (seen, chosen, targets)))
        losses.index_add_(0, chosen.nonzero()[:, 1], loss)
    return losses, is_guessed


def _losses_at(loaded: LoadedModel, ids: torch.Tensor, chosen: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The losses of the targets (n,) at n chosen positions of texts (batch, length); in float64 on the CPU."""
    head = loaded.head
    hidden, places = head.read(ids)[chosen][None], ids[chosen][None]
    losses = [
        torch.nn.functional.cross_entropy(
            head(hidden[:, piece], places[:, piece])[0].float(), targets[piece], reduction="none"
        )
        for piece in head.pieces(hidden, positions_at_once(loaded.model))
    ]
    numbers = torch.cat(losses).double().cpu() if losses else torch.zeros(0, dtype=torch.float64)
    check_finite(loaded.name, numbers)
    return numbers
