"""LongLoRA's shifted sparse attention, for any family that calls transformers' attention interface.

Half of the heads attend inside groups of tokens, the other half inside groups that are moved by half a group, so that
neighbouring groups exchange what they know (arXiv 2309.12307, section 3.2). The paper moves by rolling the sequence,
which lets its first tokens see its last ones; here the two half groups at the ends stand alone instead.
"""

from itertools import pairwise
from typing import Any

import torch

from ctxext.errors import CtxextError

NAME = "ctxext_shifted"


def register_shifted(group: int) -> str:
    """Make the attention known to transformers.

    Args:
        group: Tokens in a group.

    Returns:
        The name to load a model with, as `attn_implementation`.
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask

    def attend(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> tuple[torch.Tensor, None]:
        return shifted_attention(query, key, value, mask, group=group, **options), None

    AttentionInterface.register(NAME, attend)
    # The mask stays (batch, length), or None where nothing is padding: length × length never exists.
    AttentionMaskInterface.register(NAME, flash_attention_mask)
    return NAME


def shifted_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    group: int,
    scaling: float | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> torch.Tensor:
    """Attend inside groups; the second half of the query heads has its groups moved by half a group.

    Args:
        query: (batch, heads, length, head_dim).
        key: (batch, kv_heads, length, head_dim).
        value: (batch, kv_heads, length, head_dim).
        mask: (batch, length), true where a token is not padding; None where there is none.
        group: Tokens in a group.
        scaling: Factor on the scores; by default head_dim ** -0.5.
        dropout: Share of the attention weights that is dropped.
        others: What a family passes beside: `sliding_window`, the tokens that a layer sees at most, itself included;
            caps on scores and attention sinks are refused.

    Returns:
        (batch, length, heads, head_dim).
    """
    for name in ("softcap", "s_aux", "position_bias"):
        if others.get(name) is not None:
            raise CtxextError(f'--attention shifted does not know the "{name}" of this family.', hint="Leave it out.")
    if query.shape[2] != key.shape[2]:
        raise CtxextError("--attention shifted is for training only; it cannot decode with a cache.")
    heads, length = query.shape[1], query.shape[2]
    key, value = (tensor.repeat_interleave(heads // tensor.shape[1], dim=1) for tensor in (key, value))
    half = heads - heads // 2
    outputs = []
    for some, shift in ((slice(0, half), 0), (slice(half, heads), group // 2)):
        pieces = [
            torch.nn.functional.scaled_dot_product_attention(
                query[:, some, begin:end],
                key[:, some, begin:end],
                value[:, some, begin:end],
                attn_mask=(seen := _seen(mask, begin, end, others.get("sliding_window"), query.device)),
                is_causal=seen is None,
                scale=scaling,
                dropout_p=dropout,
            )
            for begin, end in segments(length, group, shift)
        ]
        outputs.append(torch.cat(pieces, dim=2))
    return torch.cat(outputs, dim=1).transpose(1, 2).contiguous()


def segments(length: int, group: int, shift: int) -> list[tuple[int, int]]:
    """Where the groups begin and end: each `group` tokens, but the first only `shift` where that is not 0."""
    edges = sorted({0, *range(shift, length, group), length})
    return list(pairwise(edges))


def _seen(
    mask: torch.Tensor | None, begin: int, end: int, window: int | None, device: torch.device
) -> torch.Tensor | None:
    """Which keys each query of a group sees, (batch, 1, size, size); None where causality alone decides."""
    size = end - begin
    if mask is None and (window is None or window >= size):
        return None
    distance = torch.arange(size, device=device)[:, None] - torch.arange(size, device=device)
    seen = (distance >= 0) & (distance < (window or size))
    if mask is None:
        return seen[None, None]
    # A padding token sees itself, so that no row is empty; nobody reads what it computes.
    return (seen & mask[:, None, None, begin:end].bool()) | (distance == 0)
