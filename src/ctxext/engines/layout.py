"""The order of elements within a block of an engine's cache, measured by writing numbers with the engine.

Shapes: g KV heads, n tokens of a request, d head dimensions, k blocks, s tokens of a block.
"""

import math
from typing import Any

import torch

_DIGITS = 128  # All dtypes of a cache represent integers up to this exactly.


class Layout:
    """The index of each element of a key and a value within a block of a backend's cache.

    The order within a block depends on the backend, sometimes on the processor. So it is measured: the backend writes
    keys and values with distinct numbers into an empty block, where their indices are read. Usually they are those of a
    tensor with strides; then blocks are read as views, otherwise element by element.

    Args:
        implementation: The engine's attention implementation.
        layer: The engine's attention layer.
        cache: The engine's cache of this layer, with `num_blocks` as one of its dimensions.

    Raises:
        ValueError: the block does not contain the written numbers.
    """

    def __init__(self, implementation: Any, layer: Any, cache: torch.Tensor) -> None:
        self.axis = max(range(cache.ndim), key=lambda axis: cache.shape[axis])
        self.heads, self.size = implementation.num_kv_heads, implementation.head_size
        self.tokens = cache.select(self.axis, 0).numel() // (2 * self.heads * self.size)
        self.places = [self._measure_places(implementation, layer, cache, part) for part in (0, 1)]
        self.measured = cache.shape, cache.stride()
        self.strided = [self._find_strides(cache, places) for places in self.places]

    def _measure_places(self, implementation: Any, layer: Any, cache: torch.Tensor, part: int) -> torch.Tensor:
        """Measure the indices (s · g · d) of keys (part 0) or values (part 1) within a flattened block."""
        count = self.tokens * self.heads * self.size
        numbers, decoded = torch.arange(count), torch.zeros(0, dtype=torch.long)
        slots = torch.arange(self.tokens, device=cache.device)
        for digit in range(math.ceil(math.log(count, _DIGITS))):
            scratch = torch.zeros_like(cache.narrow(self.axis, 0, 1)).contiguous()
            coded = 1 + numbers // _DIGITS**digit % _DIGITS
            coded = coded.view(self.tokens, self.heads, self.size).to(cache.device, cache.dtype)
            pair = (coded, torch.zeros_like(coded)) if part == 0 else (torch.zeros_like(coded), coded)
            implementation.do_kv_cache_update(layer, *pair, scratch, slots)
            block = scratch.flatten().long().cpu()
            decoded = (block - 1) * _DIGITS**digit + (decoded if digit else 0)
        written = block > 0
        if not torch.equal(decoded[written].sort().values, numbers):
            raise ValueError("ctxext's vLLM plugin does not support the cache of this attention backend.")
        places = torch.empty(count, dtype=torch.long)
        places[decoded[written]] = written.nonzero().flatten()
        return places.to(cache.device)

    def _find_strides(self, cache: torch.Tensor, places: torch.Tensor) -> "_Strided | None":
        """Return the view with these indices; None if strides cannot express them."""
        block = [1 if axis == self.axis else size for axis, size in enumerate(cache.shape)]
        within = zip(torch.unravel_index(places.cpu(), block), cache.stride(), strict=True)
        offsets = torch.stack([index * stride for index, stride in within]).sum(0)
        offsets = offsets.view(self.tokens, self.heads, self.size)
        first, strides = int(offsets[0, 0, 0]), []
        spanned = torch.full_like(offsets, first)
        for axis in range(3):
            line = offsets.movedim(axis, 0)[:, 0, 0]
            strides.append(int(line[1] - first) if len(line) > 1 else 1)
            spanned += (torch.arange(len(line)) * strides[axis]).view([-1 if i == axis else 1 for i in range(3)])
        if min(strides) <= 0 or not torch.equal(spanned, offsets):
            return None
        shape = cache.shape[self.axis], self.heads, self.tokens, self.size
        return _Strided(shape, (cache.stride(self.axis), strides[1], strides[0], strides[2]), first)

    def blocks(self, cache: torch.Tensor, part: int, numbers: list[int]) -> torch.Tensor:
        """Return the keys (part 0) or values (part 1) of some blocks, (k, g, s, d), possibly as a view."""
        if (strided := self.strided[part]) is not None and (cache.shape, cache.stride()) == self.measured:
            return strided.blocks(cache, numbers)
        picked = (
            cache.index_select(self.axis, torch.tensor(numbers, device=cache.device))
            .movedim(self.axis, 0)
            .flatten(1)[:, self.places[part]]
        )
        return picked.view(-1, self.tokens, self.heads, self.size).transpose(1, 2)

    def reorder(self, keys: torch.Tensor) -> torch.Tensor:
        """Return a tensor (k, any, s, d) in the memory order of the keys from `blocks`, for fast products."""
        return keys if self.strided[0] is None else self.strided[0].reorder(keys)

    def allocate(self, cache: torch.Tensor) -> "tuple[torch.Tensor, _Strided]":
        """Allocate memory for keys of all blocks in the order of the cache; return it and its view."""
        strided = self.strided[0]
        assert strided is not None
        room = torch.empty(strided.shape, dtype=cache.dtype)
        view = room.permute(strided.back)
        return room, _Strided(tuple(view.shape), view.stride(), 0)

    def gather(self, cache: torch.Tensor, numbers: list[int], length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values (1, g, n, d) of a request of length n, from the numbers of its blocks."""
        numbers = numbers[: -(-length // self.tokens)]
        key, value = (
            self.blocks(cache, part, numbers).transpose(0, 1).flatten(1, 2)[None, :, :length] for part in (0, 1)
        )
        # A single block is a view with any strides, but attention on CPUs silently requires contiguous columns.
        key, value = (states if states.stride(-1) == 1 else states.contiguous() for states in (key, value))
        return key, value


class _Strided:
    """View (blocks, g, s, d) of the keys or values in a cache, with strides and offset."""

    def __init__(self, shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> None:
        # Copies are fastest in the order of memory.
        order = [0, *sorted((1, 2, 3), key=lambda axis: -strides[axis])]
        self.shape, self.strides = [shape[axis] for axis in order], [strides[axis] for axis in order]
        self.offset, self.order, self.back = offset, order, [order.index(axis) for axis in range(4)]

    def blocks(self, cache: torch.Tensor, numbers: list[int]) -> torch.Tensor:
        view, low = cache.as_strided(self.shape, self.strides, cache.storage_offset() + self.offset), numbers[0]
        if numbers == [*range(low, low + len(numbers))]:
            return view[low : low + len(numbers)].permute(self.back)
        return view.index_select(0, torch.tensor(numbers, device=cache.device)).permute(self.back)

    def reorder(self, keys: torch.Tensor) -> torch.Tensor:
        return keys.permute(self.order).contiguous().permute(self.back)


_MOST = 1 << 32  # Maximum bytes of all layers.


class RotatedKeys:
    """The rotated far keys of one layer, in the order of its cache. Blocks use memory once they are written.

    `layout.strided` must not be None.
    """

    def __init__(self, layout: Layout, cache: torch.Tensor) -> None:
        self.layout, self.turns = layout, torch.zeros(cache.shape[layout.axis], dtype=torch.long)
        self.room, self.order = layout.allocate(cache)
        self.names: dict[Any, int] = {}

    @staticmethod
    def fits(layout: Layout, cache: torch.Tensor, layers: int) -> bool:
        """Return whether to store keys: on CPUs, which allocate memory on writing, if all layers fit the limit."""
        size = cache.numel() * cache.element_size() // 2
        return cache.device.type == "cpu" and layout.strided[0] is not None and size * layers <= _MOST

    def forget(self, slots: torch.Tensor) -> None:
        """Mark the keys of blocks with these slots as outdated, because the engine writes to them."""
        self.turns[slots // self.layout.tokens] = 0

    def blocks(self, numbers: list[int]) -> torch.Tensor:
        """Return the rotated keys of some blocks, (k, g, s, d), possibly as a view."""
        return self.order.blocks(self.room, numbers)

    def missing(self, name: Any, numbers: list[int]) -> list[int]:
        """Return the indices in the list of blocks that are not stored under this name yet."""
        turn = self.names.setdefault(name, len(self.names) + 1)
        return (self.turns[torch.tensor(numbers)] != turn).nonzero().flatten().tolist()

    def keep(self, name: Any, numbers: list[int], keys: torch.Tensor) -> None:
        """Store rotated keys (k, g, s, d) of some blocks."""
        picked = torch.tensor(numbers)
        self.room.index_copy_(0, picked, keys.permute(self.order.order))
        self.turns[picked] = self.names[name]
