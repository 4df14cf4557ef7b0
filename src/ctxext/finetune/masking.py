"""Masked sequences for encoders, by transformers' own collator; what is masked depends on the seed alone."""

import random
from collections.abc import Callable
from typing import Any

import torch

from ctxext.errors import CtxextError
from ctxext.finetune.loss import IGNORED

Masker = Callable[[torch.Tensor, torch.Tensor, str], tuple[torch.Tensor, torch.Tensor]]
"""Gives ids with some of them masked, and labels for just those; from ids, labels and a seed, each (rows, length)."""


def make_masker(tokenizer: Any, probability: float) -> Masker:
    """What masks tokens as BERT was trained (arXiv 1810.04805, section 3.1).

    Args:
        tokenizer: The model's; its special tokens are never masked, nor what the loss leaves out anyway.
        probability: Share of the tokens that are chosen: 80 % of them masked, 10 % replaced, 10 % left.

    Raises:
        CtxextError: the tokenizer has no token to mask with.
    """
    from transformers import DataCollatorForLanguageModeling

    if tokenizer.mask_token_id is None:
        raise CtxextError("The tokenizer has no mask token, without which no token can be guessed.")
    special = torch.tensor(sorted(tokenizer.all_special_ids))

    def mask(ids: torch.Tensor, labels: torch.Tensor, seed: str) -> tuple[torch.Tensor, torch.Tensor]:
        collator = DataCollatorForLanguageModeling(
            tokenizer, mlm_probability=probability, seed=1 + random.Random(seed).getrandbits(62)
        )
        kept = torch.isin(ids, special) | (labels == IGNORED)
        batch = collator(
            [{"input_ids": row, "special_tokens_mask": no} for row, no in zip(ids, kept.long(), strict=True)]
        )
        return batch["input_ids"], batch["labels"]

    return mask
