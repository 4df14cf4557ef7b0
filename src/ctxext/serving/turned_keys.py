"""Far keys of a layer, turned once for each block of an engine's cache and kept until the engine writes there again.

Shapes: g KV heads, d head dimensions, k blocks of s tokens.
"""

from typing import Any

import torch

from ctxext.serving.layout import Layout

_MOST = 1 << 32  # Bytes that all layers of a model may take.


class TurnedKeys:
    """The turned keys of one layer, in the order of its cache. Memory is taken as blocks are written.

    Args:
        layout: The order of numbers within a block; `layout.strided` must not be None.
        cache: The engine's cache of this layer.
    """

    def __init__(self, layout: Layout, cache: torch.Tensor) -> None:
        self.layout, self.turns = layout, torch.zeros(cache.shape[layout.axis], dtype=torch.long)
        self.room, self.order = layout.beside(cache)
        self.names: dict[Any, int] = {}

    @staticmethod
    def fits(layout: Layout, cache: torch.Tensor, layers: int) -> bool:
        """Whether keys are kept: on processors, where memory is taken late, if those of all layers have room."""
        size = cache.numel() * cache.element_size() // 2
        return cache.device.type == "cpu" and layout.strided[0] is not None and size * layers <= _MOST

    def forget(self, slots: torch.Tensor) -> None:
        """The engine writes to these slots."""
        self.turns[slots // self.layout.tokens] = 0

    def blocks(self, numbers: list[int]) -> torch.Tensor:
        """The turned keys of some blocks, (k, g, s, d): perhaps a view."""
        return self.order.blocks(self.room, numbers)

    def missing(self, name: Any, numbers: list[int]) -> list[int]:
        """Which of some blocks, by their places in the list, have not been turned so."""
        turn = self.names.setdefault(name, len(self.names) + 1)
        return (self.turns[torch.tensor(numbers)] != turn).nonzero().flatten().tolist()

    def keep(self, name: Any, numbers: list[int], keys: torch.Tensor) -> None:
        """Write turned keys (k, g, s, d) of some blocks."""
        picked = torch.tensor(numbers)
        self.room.index_copy_(0, picked, keys.permute(self.order.order))
        self.turns[picked] = self.names[name]
