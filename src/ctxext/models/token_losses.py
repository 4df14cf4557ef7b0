"""The loss on every token of a long text, without logits of shape length × vocabulary (`checkpoint/head.py`).

Key tokens are tokens with a low loss given the whole text and a high loss given only a short context (LongPPL,
https://arxiv.org/abs/2410.23771, with the thresholds and windows of `find_key_token` in its code).

In masked language models, masking one token at a time (Salazar et al. 2020, arXiv 1910.14659) takes one pass per
token. Here every eighth token is masked, so that eight passes predict each token once, with nearly as many masks as in
training.
"""

import functools
from collections.abc import Sequence
from itertools import groupby

import torch

from ctxext.errors import CtxextError
from ctxext.models.checkpoint_info import open_infos
from ctxext.models.model import LoadedModel, Loading, load_model
from ctxext.models.prefix_cache import forget_longer_prompts
from ctxext.models.reading import read_states

EVERY = 8
"""The distance between masked tokens, and the number of passes."""

GAIN, LOSS = 2.0, 2.0
"""With the whole text, a key token's loss falls by more than `GAIN` nats, to less than `LOSS`."""


def losses_of(loaded: LoadedModel, ids: Sequence[int]) -> torch.Tensor:
    """Compute the losses on a text's tokens: causal, or masked for a masked language model.

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
    """Compute the loss in nats on each token, given the tokens before it.

    Args:
        loaded: The model.
        ids: Tokens of shape (batch, length), without padding.
        last: The number of last tokens to compute the loss on; by default all but the first.

    Returns:
        Losses in float64 on the CPU, of shape (batch, last).
    """
    forget_longer_prompts(loaded.model)
    last = last or ids.shape[1] - 1
    is_read = torch.zeros_like(ids, dtype=torch.bool)
    is_read[:, -last - 1 : -1] = True
    return _measure_losses(loaded, ids, is_read, ids[:, -last:].flatten()).view(len(ids), last)


@torch.inference_mode()
def masked_losses(loaded: LoadedModel, ids: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the loss in nats on each token, while every eighth token is masked.

    Args:
        loaded: A masked language model.
        ids: The tokens of one text, special tokens included.

    Returns:
        Losses in float64 on the CPU, of shape (length,), and a mask of the predicted tokens: all but special tokens.
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
    for chosen in torch.split(is_masked, loaded.rows_that_fit(len(text))):
        seen, targets = torch.where(chosen, tokenizer.mask_token_id, text), text.expand_as(chosen)[chosen]
        loss = _measure_losses(loaded, *(tensor.to(loaded.device) for tensor in (seen, chosen, targets)))
        losses.index_add_(0, chosen.nonzero()[:, 1], loss)
    return losses, is_guessed


def _measure_losses(
    loaded: LoadedModel, ids: torch.Tensor, chosen: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    """Compute the losses on targets (n,) at n positions of texts (batch, length), in float64 on the CPU."""
    head = loaded.head
    states = read_states(head, ids, loaded.cache_for(ids.shape[1]))
    numbers = head.measure_losses(states[chosen][None], ids[chosen][None], targets).double().cpu()
    loaded.check_finite(numbers)
    return numbers


def losses_in_windows(
    loaded: LoadedModel, ids: Sequence[int], num_start: int, window: int, stride: int
) -> tuple[float, int]:
    """Compute the sum of the mean losses of sliding windows, and their number.

    The window moves by `stride`, and only its new tokens count. All windows have the same weight, even the first and
    longest, as in YaRN's script.
    """
    start, body = ids[:num_start], ids[num_start:]
    size = window - len(start)
    spans, previous = [], 0
    for begin in range(0, len(body), stride):
        end = min(begin + size, len(body))
        spans.append((begin, end, end - previous))
        previous = end
        if end == len(body):
            break
    means: list[float] = []
    rows = loaded.rows_that_fit(window)
    for (_, num_new), group in groupby(spans, key=lambda span: (span[1] - span[0], span[2])):
        alike = list(group)
        for first in range(0, len(alike), rows):
            windows = [[*start, *body[begin:end]] for begin, end, _ in alike[first : first + rows]]
            batch = torch.tensor(windows, device=loaded.device)
            means += token_losses(loaded, batch, last=min(num_new, batch.shape[1] - 1)).mean(1).tolist()
    return sum(means), len(means)


@functools.lru_cache(maxsize=1)
def load_evaluator(source: str, device: str) -> LoadedModel:
    """Load the model that picks key tokens, once for all evaluated models."""
    (info,) = open_infos([source])
    return load_model(info, Loading(device=device))


def key_tokens(evaluator: LoadedModel, ids: Sequence[int], window: int, step: int) -> torch.Tensor:
    """Find the indices of a text's key tokens, from `window` on.

    Args:
        evaluator: The model that picks key tokens.
        ids: The tokens of one text, more than `window`.
        window: The minimum number of tokens of the short context.
        step: The number of consecutive tokens with the same start of the short context. The context of the last one has
            up to `window + step - 1` tokens.
    """
    text = torch.tensor([list(ids)], device=evaluator.device)
    with_text = token_losses(evaluator, text)[0, window - 1 :]
    without_text = torch.empty_like(with_text)
    for end in range(window, len(ids), step):
        following = min(end + step, len(ids))
        losses = token_losses(evaluator, text[:, end - window : following], last=following - end)[0]
        without_text[end - window : following - window] = losses
    is_key = (without_text - with_text > GAIN) & (with_text < LOSS)
    return is_key.nonzero()[:, 0] + window
