"""Feed-forward blocks computed a few tokens at a time, so that their inner activations never exist for all tokens.

They treat each token separately, so the result is the same. In the backward pass each tile is computed again (TiledMLP
of ALST, arXiv 2506.13996, section 3.2).
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

_MOST_TOKENS, _LEAST_TILES = 512, 8
"""A tile has at most so many tokens, and a sequence at least so many tiles."""
_PROBE_LENGTH, _PROBE_TILE, _TOLERANCE = 8, 3, 1e-3


def tile_blocks(model: Any, length: int) -> int:
    """Compute the feed-forward blocks of a model in tiles.

    Args:
        model: A transformers language model; adapters may be added later.
        length: Tokens of the longest sequence.

    Returns:
        The number of blocks; 0 for families in which they are not separate modules.
    """
    width = model.config.get_text_config(decoder=True).hidden_size
    sample = torch.randn(1, _PROBE_LENGTH, width, generator=torch.Generator().manual_seed(0))
    sample = sample.to(device=model.device, dtype=model.dtype)
    size = max(1, min(_MOST_TOKENS, length // _LEAST_TILES))
    blocks: dict[str, Any] = {}
    for name, module in model.named_modules():
        if not any(name.startswith(f"{block}.") for block in blocks) and _is_block(module, sample):
            blocks[name] = module
    for block in blocks.values():
        block.forward = functools.partial(_compute_tiles, block.forward, size)
    return len(blocks)


def _compute_tiles(forward: Callable[[torch.Tensor], torch.Tensor], size: int, hidden: torch.Tensor) -> torch.Tensor:
    """Compute the output for hidden states of shape (…, tokens, width): some families join the rows of a batch."""
    if hidden.shape[-2] <= size:
        return forward(hidden)
    run = functools.partial(checkpoint, forward, use_reentrant=False) if torch.is_grad_enabled() else forward
    # GPT-2's layers need contiguous inputs.
    return torch.cat([run(tile.contiguous()) for tile in torch.split(hidden, size, dim=-2)], dim=-2)


@torch.no_grad()
def _is_block(module: Any, sample: torch.Tensor) -> bool:
    """Test whether a module with several matrices treats each token of a sample separately."""
    if sum(weight.ndim > 1 for weight in module.parameters()) < 2:
        return False
    was_training = module.training
    module.eval()
    try:
        whole = module(sample)
        tiles = [module(tile.contiguous()) for tile in torch.split(sample, _PROBE_TILE, dim=1)]
    except Exception:  # It needs other arguments.
        return False
    finally:
        module.train(was_training)
    if not isinstance(whole, torch.Tensor) or whole.shape != sample.shape:
        return False
    largest, difference = whole.abs().max(), (torch.cat(tiles, dim=1) - whole).abs().max()
    return bool(largest > 0) and bool(difference <= _TOLERANCE * largest)
