"""Attention of an engine that computes rows beyond the first border again, by the relation maps of the checkpoint.

vLLM gives an attention queries and keys rotated by their positions, and the start and length of each request. The map
of a row depends on its position alone, so this is enough, and prefix caching, chunked prefill and batches of any kind
work unchanged, as the cache holds what the engine always writes. First the attention of the engine runs, unchanged.
Then, for each request with rows at or beyond the border, keys and values are gathered from its blocks and the portable
functions (`portable/relation.py`) compute these rows. Shapes: t tokens, h heads, g KV heads, n keys, d head dimensions,
s tokens of a block.
"""

import functools
import math
import sys
from typing import Any

import torch

_DIGITS = 128  # Every number format of a cache holds whole numbers up to this exactly.


@functools.cache
def row_wise(implementation: type) -> type:
    """A subclass of a backend's attention implementation that also writes the rows of its `ctxext_rows`."""

    class RowWise(implementation):  # type: ignore[misc]
        __slots__ = ()  # The class of the engine's object is replaced, so that both need the same layout.
        ctxext_rows: Rows

        def forward(
            self,
            layer: Any,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            kv_cache: torch.Tensor,
            attn_metadata: Any,
            output: torch.Tensor,
            *args: Any,
            **kwargs: Any,
        ) -> torch.Tensor:
            """The engine's attention, then the rows with a relation map: query and output are (t, h, d)."""
            result: torch.Tensor = super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs
            )
            if attn_metadata is not None:  # None while the engine warms up.
                self.ctxext_rows.write(self, layer, query, kv_cache, attn_metadata, output)
            return result

    return RowWise


class Rows:
    """The rows of one layer that its relation maps change.

    Args:
        part: The `Part` of this layer, from the checkpoint's code.
        rotary: Its rotary embedding.
        methods: The relation maps of this layer, innermost first.
        first_head: The index of this rank's first KV head in the whole model.
    """

    def __init__(self, part: Any, rotary: Any, methods: list[Any], first_head: int) -> None:
        self.part, self.rotary, self.methods, self.first_head = part, rotary, methods, first_head
        # Checkpoints of 0.2.0 have one map for all layers.
        maps = [getattr(method, "maps", {}).get(part.layer, method.map) for method in methods]
        self.first = min(relation_map.first for relation_map in maps)
        self.layout: Layout | None = None

    def write(
        self,
        implementation: Any,
        layer: Any,
        query: torch.Tensor,
        cache: torch.Tensor,
        metadata: Any,
        output: torch.Tensor,
    ) -> None:
        """Replace the rows at `first` and beyond in the engine's output.

        Args:
            implementation: The engine's attention implementation.
            layer: The engine's attention layer.
            query: Rotated queries of all requests, end to end (t, h, d).
            cache: The engine's cache of this layer.
            metadata: The start and end of requests (`query_start_loc`, `seq_lens`) and their blocks (`block_table`).
            output: The engine's output (t, h, d).
        """
        starts, lengths = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
        for number, length in enumerate(lengths):
            start, stop = starts[number], starts[number + 1]
            first = max(self.first, length - (stop - start))
            if start == stop or length <= first:
                continue
            if self.layout is None:
                self.layout = Layout(implementation, layer, cache)
            key, value = self.layout.gathered(cache, metadata.block_table[number], length)
            rows = query[stop - (length - first) : stop].transpose(0, 1)[None]
            attended = self.attended(implementation, rows, key, value, first)
            output[stop - (length - first) : stop] = attended[0].to(output.dtype)

    def portable(self, name: str) -> Any:
        """A module of the checkpoint's code."""
        return sys.modules[f"{type(self.part).__module__.rpartition('.')[0]}.{name}"]

    def attended(
        self, implementation: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, first: int
    ) -> torch.Tensor:
        """The output (1, l, h, d) of the last l rows (1, h, l, d) of one request over keys and values (1, g, n, d)."""
        positions = torch.arange(first, key.shape[2], device=query.device)[None]
        frame = self.portable("modeling_family").frame_of(self.rotary, None, query)
        seam = self.portable("method")
        call = seam.Call(self.part, seam.Tables(None, [], positions, frame, {}), {})
        call.kv_heads, call.first_head = key.shape[1], self.first_head
        options = {"scaling": implementation.scale}
        if cap := getattr(implementation, "logits_soft_cap", None):
            options["softcap"] = cap
        if (sinks := getattr(implementation, "sinks", None)) is not None:
            options["s_aux"] = sinks
        inner = functools.partial(_one_row, self.portable("relation_parts"))
        for method in self.methods:
            inner = functools.partial(method.attend, inner, call)
        output: torch.Tensor = inner(query, key, value, None, **options)[0]
        return output


def _one_row(
    parts: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: None, **options: Any
) -> tuple[torch.Tensor, None]:
    """Attention of one row over all given keys: the inner attention of a relation map."""
    scores = parts.product(query, key.mT) * options["scaling"]
    return parts.softmaxed(scores, value, mask, (0, 1), key.shape[2] - 1, None, options)[0], None


class Layout:
    """The place of each number of a key and a value within a block of a backend's cache.

    Backends order a block as suits their kernels, some by the processor. So the order is measured: the backend writes
    keys and values whose numbers are all different into an empty block, where they are looked up.

    Args:
        implementation: The engine's attention implementation.
        layer: The engine's attention layer.
        cache: The engine's cache of this layer, with `num_blocks` in one of its dimensions.

    Raises:
        ValueError: the written numbers are not in the block.
    """

    def __init__(self, implementation: Any, layer: Any, cache: torch.Tensor) -> None:
        self.axis = max(range(cache.ndim), key=lambda axis: cache.shape[axis])
        self.heads, self.size = implementation.num_kv_heads, implementation.head_size
        self.tokens = cache.select(self.axis, 0).numel() // (2 * self.heads * self.size)
        self.places = [self._places(implementation, layer, cache, part) for part in (0, 1)]

    def _places(self, implementation: Any, layer: Any, cache: torch.Tensor, part: int) -> torch.Tensor:
        """Places (s · g · d) within a flattened block, of keys (part 0) or values (part 1)."""
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

    def gathered(self, cache: torch.Tensor, blocks: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values (1, g, n, d) of a request.

        Args:
            cache: The engine's cache of this layer.
            blocks: The numbers of the request's blocks, in order.
            length: How many tokens it has, n.
        """
        used = cache.index_select(self.axis, blocks[: -(-length // self.tokens)].long())
        used = used.movedim(self.axis, 0).flatten(1)
        key, value = (
            used[:, places].view(-1, self.heads, self.size)[:length].transpose(0, 1)[None] for places in self.places
        )
        return key, value
