"""Attention of an engine that computes rows beyond the first border again, by the relation maps of the checkpoint.

vLLM gives an attention queries and keys rotated by their positions, and the start and length of each request. The map
of a row depends on its position alone, so this is enough, and prefix caching, chunked prefill and batches of any kind
work unchanged, as the cache holds what the engine always writes. First the attention of the engine runs, unchanged,
unless a step has no row inside the border. Then rows at or beyond it are computed: a single one from the blocks
(`single_rows.py`), others by the portable functions (`portable/relation.py`) from gathered keys and values. Shapes:
t tokens, h heads, g KV heads, n keys, d head dimensions.
"""

import functools
import sys
from typing import Any

import torch

from ctxext.serving.layout import Layout
from ctxext.serving.single_rows import Request, SingleRows
from ctxext.serving.turned_keys import TurnedKeys


@functools.cache
def row_wise(implementation: type) -> type:
    """A subclass of a backend's attention implementation that also writes the rows of its `ctxext_rows`."""

    class RowWise(implementation):  # type: ignore[misc]
        __slots__ = ()  # The class of the engine's object is replaced, so that both need the same layout.
        ctxext_rows: Rows

        def do_kv_cache_update(
            self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
        ) -> None:
            """The engine's own; keys that were turned of blocks that it writes to are out of date."""
            if self.ctxext_rows.turned is not None:
                self.ctxext_rows.turned.forget(slot_mapping)
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)

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
            has_rows = attn_metadata is not None  # None while the engine warms up.
            result = output
            if not (has_rows and self.ctxext_rows.are_all(layer, attn_metadata, (*args, *kwargs.values()))):
                result = super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)
            if has_rows:
                self.ctxext_rows.write(self, layer, query, kv_cache, attn_metadata, output)
            return result

    return RowWise


class Step:
    """What all layers share of one step of the engine, and of single rows of all steps."""

    def __init__(self) -> None:
        self.metadata: Any = None
        self.requests: list[tuple[int, int, int, int]] = []
        self.memories: dict[tuple[int, int], dict[Any, Any]] = {}
        self.numbers: dict[int, list[int]] = {}
        self.single = SingleRows()
        self.layers = 0

    def see(self, metadata: Any) -> list[tuple[int, int, int, int]]:
        """Requests with tokens in a step: number, first token, end, and how many tokens they have by then."""
        if metadata is not self.metadata:
            starts, lengths = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
            spans = zip(range(len(lengths)), starts, starts[1:], lengths, strict=False)
            self.metadata, self.memories, self.numbers = metadata, {}, {}
            self.requests = [span for span in spans if span[1] < span[2]]
        return self.requests

    def blocks(self, metadata: Any, number: int, count: int) -> list[int]:
        """The numbers of the first blocks of a request of the step that `see` saw."""
        if number not in self.numbers:
            self.numbers[number] = metadata.block_table[number][:count].tolist()
        return self.numbers[number]

    def memory(self, rows: int, keys: int) -> dict[Any, Any]:
        """What the portable functions keep from layer to layer: it hangs on these two numbers alone."""
        return self.memories.setdefault((rows, keys), {}) if rows > 1 else {}


class Rows:
    """The rows of one layer that its relation maps change.

    Args:
        part: The `Part` of this layer, from the checkpoint's code.
        attention: Its attention, a module of the checkpoint's model.
        rotary: Its rotary embedding.
        methods: The relation maps of this layer, innermost first.
        first_head: The index of this rank's first KV head in the whole model.
        step: What the layers of the model share.
        keeps_keys: Whether turned keys may be kept: all writes to the cache of this layer go through its attention.
    """

    def __init__(
        self,
        part: Any,
        attention: Any,
        rotary: Any,
        methods: list[Any],
        first_head: int,
        step: Step | None = None,
        *,
        keeps_keys: bool = False,
    ) -> None:
        self.part, self.attention, self.rotary, self.methods = part, attention, rotary, methods
        self.first_head = first_head
        self.step = step or Step()
        self.step.layers += 1
        self.keeps_keys = keeps_keys
        self.turned: TurnedKeys | None = None
        maps = [method.maps.get(part.layer, method.map) for method in methods]
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
        for number, start, stop, length in self.step.see(metadata):
            first = max(self.first, length - (stop - start))
            if length <= first:
                continue
            if self.layout is None:
                self.layout = Layout(implementation, layer, cache)
                if self.keeps_keys and TurnedKeys.fits(self.layout, cache, self.step.layers):
                    self.turned = TurnedKeys(self.layout, cache)
            blocks = self.step.blocks(metadata, number, -(-length // self.layout.tokens))
            if length - first == 1:
                request = Request(self.layout, cache, blocks, length, self.turned)
                attended = self.single(implementation, query[stop - 1], request)
                if attended is not None:
                    output[stop - 1] = attended
                    continue
            key, value = self.layout.gathered(cache, blocks, length)
            rows = query[stop - (length - first) : stop].transpose(0, 1)[None]
            attended = self.attended(implementation, rows, key, value, first)
            output[stop - (length - first) : stop] = attended[0].to(output.dtype)

    def are_all(self, layer: Any, metadata: Any, more: tuple[Any, ...]) -> bool:
        """Whether every row of a step is to be replaced, and the engine's attention does nothing else.

        Args:
            layer: The engine's attention layer.
            metadata: As for `write`.
            more: Further arguments of the attention, such as scales of a quantized output.
        """
        writes_cache = getattr(getattr(layer, "attn_backend", None), "forward_includes_kv_cache_update", True)
        if writes_cache or any(argument is not None for argument in more):
            return False
        return all(length - (stop - start) >= self.first for _, start, stop, length in self.step.see(metadata))

    def portable(self, name: str) -> Any:
        """A module of the checkpoint's code."""
        return sys.modules[f"{type(self.part).__module__.rpartition('.')[0]}.{name}"]

    def call(self, query: torch.Tensor, first: int, length: int, heads: int) -> Any:
        """The call of a layer, for rows from `first` on of a request of some length."""
        frame = self.portable("modeling_family").frame_of(self.rotary, None, query)
        seam = self.portable("method")
        positions = torch.arange(first, length, device=query.device)[None]
        tables = seam.Tables(None, [], positions, frame, self.step.memory(length - first, length))
        call = seam.Call(self.part, self.attention, tables, {})
        call.kv_heads, call.first_head = heads, self.first_head
        return call

    def single(self, implementation: Any, query: torch.Tensor, request: Request) -> torch.Tensor | None:
        """The output (h, d) of a request's last row (h, d) by `single_rows.py`, or None where it does not apply."""
        if len(self.methods) > 1 or special_of(implementation):
            return None
        call = self.call(query, request.length - 1, request.length, request.layout.heads)
        (method,) = self.methods
        if not self.step.single.can_attend(method, call, request.layout.size):
            return None
        return self.step.single.attend(method, call, query, request, implementation.scale)

    def attended(
        self, implementation: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, first: int
    ) -> torch.Tensor:
        """The output (1, l, h, d) of the last l rows (1, h, l, d) of one request over keys and values (1, g, n, d)."""
        call = self.call(query, first, key.shape[2], key.shape[1])
        options = {"scaling": implementation.scale, **special_of(implementation)}
        inner = functools.partial(_one_row, self.portable("relation_parts"))
        for method in self.methods:
            inner = functools.partial(method.attend, inner, call)
        output: torch.Tensor = inner(query, key, value, None, **options)[0]
        return output


def special_of(implementation: Any) -> dict[str, Any]:
    """What a family's attention does besides, as the portable functions name it."""
    options = {"softcap": getattr(implementation, "logits_soft_cap", None) or None}
    options["s_aux"] = getattr(implementation, "sinks", None)
    return {name: option for name, option in options.items() if option is not None}


def _one_row(
    parts: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: None, **options: Any
) -> tuple[torch.Tensor, None]:
    """Attention of one row over all given keys: the inner attention of a relation map."""
    scores = parts.product(query, key.mT) * options["scaling"]
    return parts.softmaxed(scores, value, mask, (0, 1), key.shape[2] - 1, None, options)[0], None
