"""Attention per document during training, for families that use transformers' attention functions.

transformers distinguishes packed documents by restarting positions, and its sdpa builds a mask of length × length for
them. Here the mask has one number per token, the number of tokens it attends to, and each document is attended
separately, so that memory grows linearly with the number of tokens.
"""

from itertools import pairwise
from typing import Any

import torch

from ctxext.checkpoint.head import base_of
from ctxext.files.offline import forbid_network

DOCUMENTS = "ctxext_documents"


def attend_by_document(model: Any) -> bool:
    """Replace the attention of a model if it is a transformers class with sdpa; return whether it was replaced."""
    with forbid_network():
        from transformers import AttentionInterface
        from transformers.masking_utils import AttentionMaskInterface

    is_stock = type(model).__module__.startswith("transformers.models.")
    # Without an attention backend a family has its own attention, which does not support this mask.
    if not (is_stock and model._supports_attention_backend and model.config._attn_implementation == "sdpa"):
        return False
    AttentionInterface.register(DOCUMENTS, document_attention)
    AttentionMaskInterface.register(DOCUMENTS, document_mask)
    model.set_attn_implementation(DOCUMENTS)
    return True


def attends_by_document(model: Any) -> bool:
    """Return whether the model attends packed documents without a mask of length × length."""
    attention = str(model.config._attn_implementation)
    return attention == DOCUMENTS or "flash" in attention


_PROBE_LENGTH = 8


@torch.no_grad()
def can_separate_documents(model: Any, first_index: int | None) -> bool:
    """Test whether a packed document's hidden states are independent of the document before it.

    They depend on it if layers pass on a state (Mamba, convolutions, linear attention), if the model counts positions
    internally, or if a family builds its mask without the positions, as gpt-oss does in transformers 5.

    Args:
        model: A transformers language model.
        first_index: Value of `position_ids` at the first position; None if the model has no such argument.
    """
    size = model.config.get_text_config(decoder=True).vocab_size
    tokens = torch.arange(_PROBE_LENGTH, device=model.device)
    places = {} if first_index is None else {"position_ids": tokens.repeat(2)[None] + first_index}
    was_training = model.training
    model.eval()
    try:
        first, second = (
            base_of(model)(
                input_ids=torch.cat([before, tokens * 11])[None] % size, use_cache=False, **places
            ).last_hidden_state[0, _PROBE_LENGTH:]
            for before in (tokens * 7 + 1, tokens * 5 + 3)
        )
    finally:
        model.train(was_training)
    # Mixtures of experts round slightly differently, because each expert's batch has other tokens.
    return float((first - second).abs().max()) <= float(torch.finfo(first.dtype).eps ** 0.5 * first.float().std())


def document_mask(**arguments: Any) -> torch.Tensor | None:
    """Return the number of tokens that each token attends to, itself included: (batch, length); else sdpa's mask."""
    with forbid_network():
        from transformers.masking_utils import sdpa_mask

    num_queries = int(arguments["q_length"])
    if arguments.get("attention_mask") is None and num_queries == arguments["kv_length"] > 1:
        mask_function, batch_size, device = (arguments[key] for key in ("mask_function", "batch_size", "device"))
        counts = _count_attended(mask_function, batch_size, num_queries, device)
        if counts is not None:
            return counts
    mask: torch.Tensor | None = sdpa_mask(**arguments)
    return mask


def _count_attended(mask_function: Any, batch_size: int, length: int, device: torch.device) -> torch.Tensor | None:
    """Return the number of tokens each token attends to; None for a single document or non-causal attention."""
    rows = torch.arange(batch_size, device=device)[:, None]
    tokens = torch.arange(length, device=device)[None]
    shape = (batch_size, length - 1)
    is_same = mask_function(rows, 0, tokens[:, 1:], tokens[:, :-1]).expand(shape)
    if is_same.all() or mask_function(rows, 0, tokens[:, :-1], tokens[:, 1:]).expand(shape).any():
        return None
    starts = torch.nn.functional.pad(tokens[:, 1:].masked_fill(is_same, 0), (1, 0)).cummax(dim=1).values
    counts = tokens - starts + 1
    # The last token of the longest document attends to all of it, or only to a window.
    row, last = divmod(int(counts.argmax()), length)
    attended = mask_function(rows[row : row + 1], 0, tokens[:, last : last + 1], tokens[:, : last + 1])
    return counts.clamp(max=int((attended.flatten() & (tokens[0, : last + 1] >= starts[row, last])).sum()))


def document_attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, **options: Any
) -> tuple[torch.Tensor, None]:
    """Attend as sdpa does, but separately per document if the mask is from `document_mask` with shape (batch, length).

    Args:
        module: The attention of a layer.
        query: (batch, heads, length, head_dim).
        key: (batch, kv_heads, length, head_dim).
        value: (batch, kv_heads, length, head_dim).
        mask: From `document_mask`.
        options: Other arguments that transformers passes to its own functions.

    Returns:
        (batch, length, heads, head_dim), and None instead of attention weights.
    """
    with forbid_network():
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if mask is None or mask.dim() != 2:
        output: tuple[torch.Tensor, None] = sdpa_attention_forward(module, query, key, value, mask, **options)
        return output
    rows = []
    for row, counts in enumerate(mask.tolist()):
        edges = [place for place, size in enumerate(counts) if size == 1] + [len(counts)]
        pieces = []
        for begin, end in pairwise(edges):
            window = max(counts[begin:end])
            # With a window, attend in parts of the window's size; each part also attends to the one before.
            step = end - begin if window == end - begin else window
            for first in range(begin, end, step):
                last, start = min(first + step, end), max(begin, first - window + 1)
                window_mask = None
                if window < end - begin:
                    places = torch.arange(start, last, device=query.device)
                    distance = places[first - start :, None] - places
                    window_mask = ((distance >= 0) & (distance < window))[None, None]
                states = (
                    query[row : row + 1, :, first:last],
                    *(of[row : row + 1, :, start:last] for of in (key, value)),
                )
                pieces.append(sdpa_attention_forward(module, *states, window_mask, **options)[0])
        rows.append(torch.cat(pieces, dim=1))
    return torch.cat(rows), None
