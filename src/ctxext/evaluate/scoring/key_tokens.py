"""Key tokens: those that a model predicts well from the whole text and badly from the last part of it.

LongPPL, https://arxiv.org/abs/2410.23771, with its thresholds.
"""

import functools
from collections.abc import Sequence

import torch

from ctxext.evaluate.checkpoint_info import open_infos
from ctxext.evaluate.model import LoadedModel, Loading, load_model
from ctxext.evaluate.scoring.token_losses import token_losses

GAIN, LOSS = 2.0, 2.0
"""A key token's loss falls by more than `GAIN` nats with the whole text, to less than `LOSS`."""


@functools.lru_cache(maxsize=1)
def load_evaluator(source: str, device: str) -> LoadedModel:
    """Load the model that finds key tokens, once for all models that are measured."""
    (info,) = open_infos([source])
    return load_model(info, Loading(device=device))


def key_tokens(evaluator: LoadedModel, ids: Sequence[int], window: int, num_start: int = 0) -> torch.Tensor:
    """The indices of a text's key tokens, from `window` on.

    Args:
        evaluator: The model that decides.
        ids: The tokens of one text.
        window: The length of the last part; it moves by a quarter of itself.
        num_start: The number of begin tokens, which each part gets too.
    """
    text = torch.tensor([list(ids)], device=evaluator.device)
    whole = token_losses(evaluator, text)[0]
    parts, end = [], window
    while end < len(ids):
        following = min(end + window // 4, len(ids))
        begin = max(num_start, following - window + num_start)
        part = torch.cat([text[:, :num_start], text[:, begin:following]], dim=1)
        parts.append(token_losses(evaluator, part, last=following - end)[0])
        end = following
    if not parts:
        return torch.zeros(0, dtype=torch.long)
    with_text = whole[window - 1 :]
    is_key = (torch.cat(parts) - with_text > GAIN) & (with_text < LOSS)
    return is_key.nonzero()[:, 0] + window
