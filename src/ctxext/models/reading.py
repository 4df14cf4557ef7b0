"""Reading of tokens, in one call or in pieces on a cache.

Attention within a window costs length × window, but torch's kernels compute length × length and hide the rest. In
pieces on a cache, a layer with a window computes each piece against the window only, and no mask of length × length is
in memory. Without windows, one call is faster: it needs no mask.
"""

import inspect
from collections.abc import Iterator
from typing import Any

import torch

from ctxext.checkpoint.durations import CPU_PIECE
from ctxext.checkpoint.head import Head
from ctxext.models.prefix_cache import PrefixCache
from ctxext.verify.decoding_process import cache_argument

_PIECE = {"cpu": CPU_PIECE}
_LARGE_PIECE = 2048
"""Size of pieces in tokens. It is not measured in each run, because other pieces would round differently."""


def piece_size(device: torch.device) -> int:
    """Return the size of pieces on a device, in tokens."""
    return _PIECE.get(device.type, _LARGE_PIECE)


def run(model: Any, ids: torch.Tensor, num_kept: int, cache: PrefixCache | None = None) -> torch.Tensor:
    """Return the logits after the last tokens of some prompts, of shape (batch, num_kept, vocabulary).

    Args:
        model: A causal language model.
        ids: Tokens of shape (batch, length), without padding.
        num_kept: The number of last tokens to return logits of.
        cache: The cache of the tokens before, which is extended.
    """
    options = limit_logits(model, num_kept)
    if cache is None:
        return _take_last(model(input_ids=ids, use_cache=False, **options), num_kept)
    for piece, on_cache in _pieces(model, ids, num_kept, cache):
        output = model(input_ids=piece, **on_cache, **options)
    return _take_last(output, num_kept)


def read_states(head: Head, ids: torch.Tensor, cache: PrefixCache | None) -> torch.Tensor:
    """Return the last hidden states of tokens (batch, length), without padding, as `Head.read`.

    Args:
        head: The head of a model, and what comes before it.
        ids: Tokens of shape (batch, length).
        cache: An empty cache to read them in pieces, or None to read them in one call.
    """
    if cache is None:
        return head.read(ids)
    return torch.cat([head.read(piece, **on_cache) for piece, on_cache in _pieces(head.model, ids, 1, cache)], dim=1)


def _pieces(
    model: Any, ids: torch.Tensor, num_kept: int, cache: PrefixCache
) -> Iterator[tuple[torch.Tensor, dict[str, Any]]]:
    """Yield each piece of some tokens, with the arguments to read it on the cache, which counts them.

    Pieces are counted from the end, so that the last one contains all returned logits.
    """
    length = ids.shape[1]
    in_one = cache.length == 0 and not cache.has_window_within(length)
    size = length if in_one else max(num_kept, piece_size(ids.device))
    first = length % size or size
    if first == 1 < length and cache.has_states:  # Zamba 2 computes a single token differently.
        first += size
    on_cache = {cache_argument(model): cache.cache, "use_cache": True}
    for piece in (ids[:, :first], *(torch.split(ids[:, first:], size, dim=1) if first < length else ())):
        yield piece, on_cache
        cache.length += piece.shape[1]


def limit_logits(model: Any, count: int) -> dict[str, Any]:
    """Return the argument of a model's forward that limits logits to the last tokens, if it has one."""
    return {"logits_to_keep": count} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}


def _take_last(output: Any, num_kept: int) -> torch.Tensor:
    logits: torch.Tensor = output.logits
    return logits[:, -num_kept:]
