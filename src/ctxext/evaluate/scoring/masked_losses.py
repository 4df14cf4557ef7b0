"""The loss of every token of a text by a masked language model.

Masking one token at a time (Salazar et al. 2020, arXiv 1910.14659) takes as many passes as there are tokens. Here every
eighth token is masked, so that eight passes predict each token once, with nearly as many masks as in training.
"""

from collections.abc import Sequence

import torch

from ctxext.errors import CtxextError
from ctxext.evaluate.model import LoadedModel
from ctxext.evaluate.scoring.batch_size import rows_that_fit
from ctxext.evaluate.scoring.exact_match import check_finite
from ctxext.evaluate.scoring.token_losses import logits_at, token_losses

EVERY = 8
"""The distance between masked tokens, and the number of passes."""


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
    rows = rows_that_fit(loaded.model, len(text))
    for chosen in torch.split(is_masked, rows):
        seen = torch.where(chosen, tokenizer.mask_token_id, text).to(loaded.device)
        logits = logits_at(loaded, seen, chosen.to(loaded.device)).float()
        targets = text.expand_as(chosen)[chosen].to(loaded.device)
        loss = torch.nn.functional.cross_entropy(logits, targets, reduction="none").double().cpu()
        losses.index_add_(0, chosen.nonzero()[:, 1], loss)
    check_finite(loaded.name, losses)
    return losses, is_guessed


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
