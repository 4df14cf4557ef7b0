"""The feed-forward parts of a model, some tokens at once: what they compute in between is never there for all tokens.

They see each token by itself, so the result is the same. On the way back each tile is computed again (TiledMLP of ALST,
arXiv 2506.13996, section 3.2).
"""

import contextlib
import ctypes
import functools
import os
import sys
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from ctxext.errors import CtxextError

_NAMES = ("mlp", "feed_forward", "ffn", "ff")
_PROBE, _PROBE_TILE, _TOLERANCE = 8, 3, 1e-4
_MMAP_THRESHOLD, _BLOCK = -3, 1 << 20


def tile_mlps(model: Any, size: int) -> None:
    """Compute the feed-forward parts of all layers in tiles of `size` tokens of each row."""
    width = model.config.get_text_config(decoder=True).hidden_size
    sample = torch.randn(1, _PROBE, width, generator=torch.Generator().manual_seed(0))
    sample = sample.to(device=model.device, dtype=model.dtype)
    parts = [
        module
        for name, module in model.named_modules()
        if name.rsplit(".", 1)[-1] in _NAMES and _sees_each_token_alone(module, sample)
    ]
    for part in parts:
        part.forward = functools.partial(_tiled, part.forward, size)
    if not parts:
        raise CtxextError(
            f'"{type(model).__name__}" has no feed-forward part that --mlp-tile knows.', hint="Leave it out."
        )
    if model.device.type == "cpu":
        give_blocks_back()


def give_blocks_back() -> None:
    """Have glibc give each block of 1 MiB or more back to the kernel, unless the environment tells it something else.

    As it comes, it keeps blocks below the largest that it has seen freed, up to 32 MiB: what it keeps of tiles, in
    pieces, is more than they save, and at a short length it keeps what it gives back at a long one.
    """
    if sys.platform == "linux" and not any(name.startswith("MALLOC_") for name in os.environ):
        with contextlib.suppress(AttributeError):  # Another C library.
            ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, _BLOCK)


def _tiled(forward: Any, size: int, hidden: torch.Tensor) -> torch.Tensor:
    if hidden.shape[1] <= size:
        result: torch.Tensor = forward(hidden)
        return result
    run = functools.partial(checkpoint, forward, use_reentrant=False) if torch.is_grad_enabled() else forward
    return torch.cat([run(tile) for tile in _cut(hidden, size)], dim=1)


def _cut(hidden: torch.Tensor, size: int) -> list[torch.Tensor]:
    """Parts of (batch, length, width) along the length; GPT-2's layers want them contiguous."""
    return [hidden[:, begin : begin + size].contiguous() for begin in range(0, hidden.shape[1], size)]


@torch.no_grad()
def _sees_each_token_alone(module: Any, sample: torch.Tensor) -> bool:
    """Try it: mixtures of experts give more than a tensor, and other parts may look at their neighbours."""
    was_training = module.training
    module.eval()
    try:
        whole = module(sample)
        if not isinstance(whole, torch.Tensor):
            return False
        tiles = torch.cat([module(tile) for tile in _cut(sample, _PROBE_TILE)], dim=1)
    except (TypeError, ValueError, RuntimeError):
        return False
    finally:
        module.train(was_training)
    difference = (tiles - whole).abs().max()
    return tiles.shape == whole.shape and bool(difference <= _TOLERANCE * whole.abs().max().clamp(min=1e-6))
