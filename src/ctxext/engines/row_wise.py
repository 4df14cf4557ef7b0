"""Attention for vLLM that recomputes query positions ("rows") beyond the first border by relation maps.

vLLM passes rotated queries and keys to an attention, and the start and length of each request. This is sufficient,
because the map of a row depends only on its position. Prefix caching, chunked prefill and all kinds of batches work,
because the content of the cache is unchanged. First the engine's attention runs, unless all rows of the step will be
replaced. Then the rows at or beyond the border are computed: a single row from the blocks (`SingleRows`), several by
the portable functions (`portable/relation.py`) from gathered keys and values.
Shapes: t tokens, h heads, g KV heads, n keys, d head dimensions.
"""

import functools
import sys
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ctxext.engines.layout import Layout, RotatedKeys

_PIECE, _PIECE_ELSEWHERE = 1 << 18, 1 << 24  # Elements of keys that are read at once on CPUs, and elsewhere.
_ROOM = 1 << 26  # Elements of cached waves.
_ROWS, _GROUPS = 16, 256  # Rows with rotations computed at once, and groups of them in memory.
_MORE = 8  # Blocks by which waves are extended.


@dataclass(frozen=True)
class Request:
    """Keys and values of a request in the cache of a layer: its block numbers, length, and rotated keys."""

    layout: Layout
    cache: torch.Tensor
    numbers: list[int]
    length: int
    rotated: RotatedKeys | None = None

    @property
    def step(self) -> int:
        """Number of blocks to read at once."""
        size = _PIECE if self.cache.device.type == "cpu" else _PIECE_ELSEWHERE
        block_size: int = self.layout.tokens * self.layout.heads * self.layout.size
        return max(1, size // block_size)

    def pieces(
        self, part: int, low: int, high: int, rotated: RotatedKeys | None = None
    ) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Yield blocks of the tokens from `low` to `high`: first block, end, and keys or values (k, g, s, d)."""
        layout, end = self.layout, -(-high // self.layout.tokens)
        for first in range(low // layout.tokens, end, self.step) if low < high else ():
            stop = min(first + self.step, end)
            numbers = self.numbers[first:stop]
            yield first, stop, layout.blocks(self.cache, part, numbers) if rotated is None else rotated.blocks(numbers)


class SingleRows:
    """State of single rows, shared by all layers and steps: rotations of queries, and waves that rotate far keys."""

    def __init__(self) -> None:
        self.inverse: torch.Tensor | None = None
        self.changes = 0  # Number of changes of the frequencies.
        self.ahead: OrderedDict[Any, Any] = OrderedDict()
        self.waves: OrderedDict[Any, list[torch.Tensor]] = OrderedDict()
        self.partners: dict[Any, Any] = {}

    def can_attend(self, method: Any, call: Any, size: int) -> bool:
        """Return whether the method is supported: all heads of `size` dimensions must rotate equally, in pairs."""
        inverse = call.tables.frame.inverse
        if self.inverse is None or not torch.equal(self.inverse, inverse):
            self.inverse = inverse.clone()
            self.changes += 1
            for cache in (self.ahead, self.waves, self.partners):
                cache.clear()
        if not (hasattr(method, "ahead") and call.rotates_heads_alike):
            return False
        name = tuple(map(id, call.methods)), size
        if name not in self.partners:
            self.partners[name] = find_partners(call, size)
        return self.partners[name] is not None

    def attend(self, method: Any, call: Any, query: torch.Tensor, request: Request, scale: float) -> torch.Tensor:
        """Compute the output (h, d) of a request's last row (h, d)."""
        layout, rules = request.layout, method.maps.get(call.layer, method.map)
        level, parts, matrix = self.find_parts(method, call, rules, request.length - 1, query)
        queries = (query.float() @ matrix * scale).to(query.dtype).view(layout.heads, -1, len(parts), layout.size)
        count = -(-request.length // layout.tokens)
        scores = queries.new_full((*queries.shape[:2], count * layout.tokens), -torch.inf, dtype=torch.float32)
        for number, (name, low, high) in enumerate(parts):
            rotates = name == "far" and low < high and rules.rotates_keys and level > 0
            rotated = request.rotated if rotates else None
            if rotated is not None:
                self.store_rotated(method, call, rules, level, request, -(-high // layout.tokens))
            turn = self.find_waves(method, call, rules, level, request) if rotates and rotated is None else None
            for first, stop, key in request.pieces(0, low, high, rotated):
                if turn is not None:
                    key = rotate_keys(key, turn[0][first:stop], turn[1][first:stop], turn[2])
                start = first * layout.tokens
                a, b = max(low, start), min(high, stop * layout.tokens)
                products = (queries[:, :, number] @ key.mT).permute(1, 2, 0, 3).flatten(2)
                scores[:, :, a:b] = products[:, :, a - start : b - start]
        shares = scores.softmax(-1).to(query.dtype).unflatten(2, (count, -1)).permute(2, 0, 1, 3)
        output = query.new_zeros(*queries.shape[:2], layout.size, dtype=torch.float32)
        for low, high in merge_spans(parts, layout.tokens):
            for first, stop, value in request.pieces(1, low, high):
                if stop == count:  # Values after the last token are undefined.
                    value = value.clone()
                    value[-1, :, request.length - (count - 1) * layout.tokens :] = 0
                output += (shares[first:stop] @ value).sum(0)
        return output.flatten(0, 1).to(query.dtype)

    def find_parts(self, method: Any, call: Any, rules: Any, m: int, like: torch.Tensor) -> tuple[int, list[Any], Any]:
        """Return the level of the row at m, its parts (name, first key, end), and the matrix for its query."""
        group, at = divmod(m, _ROWS)
        name = id(rules), group, like.shape[-1], like.device
        if name not in self.ahead:
            self.ahead[name] = method.ahead(call, rules, group * _ROWS, like.shape[-1], like.device)
            if len(self.ahead) > _GROUPS:
                self.ahead.popitem(last=False)
        rows, _, borders, matrices = self.ahead[name]
        level, far, middle, near = borders[at]
        parts = [("far", 0, far), ("middle", middle, near), ("near", near, m + 1)]
        return level, [part for part in parts if part[0] != "middle" or rows.at_middle is not None], matrices[at]

    def store_rotated(self, method: Any, call: Any, rules: Any, level: int, request: Request, count: int) -> None:
        """Rotate and store the keys of a request's first blocks that are not stored for this level yet."""
        rotated, name = request.rotated, (self.changes, id(rules), tuple(map(id, call.methods)), level)
        assert rotated is not None
        missing = rotated.missing(name, request.numbers[:count])
        turn = self.find_waves(method, call, rules, level, request) if missing else ()
        for start in range(0, len(missing), request.step):
            places = missing[start : start + request.step]
            numbers = [request.numbers[place] for place in places]
            key = request.layout.blocks(request.cache, 0, numbers)
            rotated.keep(name, numbers, rotate_keys(key, turn[0][places], turn[1][places], turn[2]))

    def find_waves(self, method: Any, call: Any, rules: Any, level: int, request: Request) -> tuple[Any, ...]:
        """Return two waves (k, 1, s, d) of all far blocks of a level, in the cache's order, and the column partners."""
        layout, count, tokens = request.layout, len(request.numbers), request.layout.tokens
        name = id(rules), tuple(map(id, call.methods)), level, tokens, layout.size, request.cache.device
        partner = self.partners[name[1], layout.size]
        factors = self.waves.pop(name, [])
        have = len(factors[0]) if factors else 0
        if have < count:
            more = compute_waves(method, call, rules, (level, have * tokens, (count + _MORE) * tokens), partner)
            more = [wave.view(-1, 1, tokens, layout.size) for wave in more]
            more = [torch.cat(pair) for pair in zip(factors, more, strict=True)] if factors else more
            factors = [layout.reorder(wave) for wave in more]
        self.waves[name] = factors
        while len(self.waves) > 1 and sum(2 * pair[0].numel() for pair in self.waves.values()) > _ROOM:
            self.waves.popitem(last=False)
        return *factors, partner


def merge_spans(parts: list[Any], tokens: int) -> list[tuple[int, int]]:
    """Return the spans of tokens that are read, merged if they share a block."""
    (_, _, far), (_, near, _), (_, _, end) = parts[0], parts[1], parts[-1]
    if far == 0:
        return [(near, end)]
    return [(0, end)] if near // tokens <= -(-far // tokens) else [(0, far), (near, end)]


def rotate_keys(key: torch.Tensor, wave: torch.Tensor, pair_wave: torch.Tensor, partner: torch.Tensor) -> torch.Tensor:
    """Rotate keys (k, g, s, d) by waves (k, 1, s, d): combine each column with its partner."""
    wide = key.float()
    swapped = torch.index_select(wide, 3, partner, out=torch.empty_like(wide))
    return (wide * wave).addcmul_(swapped, pair_wave).to(key.dtype)


def find_partners(call: Any, size: int) -> torch.Tensor | None:
    """Return the rotation partner of each of `size` columns, or the column itself; None if they do not form pairs."""
    device = call.tables.frame.inverse.device
    at, since = torch.full((1, 1), 1, device=device), torch.zeros(1, 1, device=device, dtype=torch.long)
    matrix = call.turn(torch.eye(size, device=device)[None, :, None], at, since)[0, :, 0].T
    others = matrix.clone().fill_diagonal_(0) != 0
    partner = torch.where(others.any(-1), others.long().argmax(-1), torch.arange(size, device=device))
    is_paired = int(others.sum(-1).max()) <= 1 and torch.equal(partner[partner], torch.arange(size, device=device))
    return partner if is_paired else None


def compute_waves(
    method: Any, call: Any, rules: Any, span: tuple[int, ...], partner: torch.Tensor
) -> list[torch.Tensor]:
    """Return the factors (n, d) of far keys' columns and of their partners, for a span (level, from, to).

    They are measured by rotating two vectors: ones in the first column of each pair, and ones in the other columns.
    """
    level, low, high = span
    is_first = torch.arange(len(partner), device=partner.device) <= partner
    probe = torch.stack([is_first, ~is_first]).float()[None, :, None].expand(-1, -1, high - low, -1)
    of_first, of_rest = method.rotate_far_keys(call, rules, probe, low, level)[0]
    return [torch.where(is_first, of_first, of_rest), torch.where(is_first, of_rest, of_first)]


@functools.cache
def make_row_wise(implementation: type) -> type:
    """Create a subclass of a backend's attention that also computes the rows of its `ctxext_rows`."""

    class RowWise(implementation):  # type: ignore[misc]
        __slots__ = ()  # The class of an existing object is replaced, which requires the same layout.
        ctxext_rows: Rows

        def do_kv_cache_update(
            self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
        ) -> None:
            """Update the engine's cache, and mark the rotated keys of these blocks as outdated."""
            if self.ctxext_rows.rotated is not None:
                self.ctxext_rows.rotated.forget(slot_mapping)
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
            """Run the engine's attention, then compute the rows of relation maps; query and output are (t, h, d)."""
            has_rows = attn_metadata is not None  # None during the engine's warm-up.
            result = output
            if not (has_rows and self.ctxext_rows.are_all(layer, attn_metadata, (*args, *kwargs.values()))):
                result = super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)
            if has_rows:
                self.ctxext_rows.write(self, layer, query, kv_cache, attn_metadata, output)
            return result

    return RowWise


class Step:
    """State shared by all layers: of one engine step, and of single rows in all steps."""

    def __init__(self) -> None:
        self.metadata: Any = None
        self.requests: list[tuple[int, int, int, int]] = []
        self.memories: dict[tuple[int, int], dict[Any, Any]] = {}
        self.numbers: dict[int, list[int]] = {}
        self.single = SingleRows()
        self.layers = 0

    def get_requests(self, metadata: Any) -> list[tuple[int, int, int, int]]:
        """Return the requests of a step with tokens: number, first token, end, and length after the step."""
        if metadata is not self.metadata:
            starts, lengths = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
            spans = zip(range(len(lengths)), starts, starts[1:], lengths, strict=False)
            self.metadata, self.memories, self.numbers = metadata, {}, {}
            self.requests = [span for span in spans if span[1] < span[2]]
        return self.requests

    def blocks(self, metadata: Any, number: int, count: int) -> list[int]:
        """Return the numbers of the first blocks of a request in the step that was passed to `get_requests`."""
        if number not in self.numbers:
            self.numbers[number] = metadata.block_table[number][:count].tolist()
        return self.numbers[number]

    def memory(self, rows: int, keys: int) -> dict[Any, Any]:
        """Return the buffers of the portable functions, shared by layers with these numbers of rows and keys."""
        return self.memories.setdefault((rows, keys), {}) if rows > 1 else {}


class Rows:
    """The rows of one layer that relation maps change.

    Args:
        part: The `Part` of this layer, from the checkpoint's code.
        attention: Its attention, a module of the checkpoint's model.
        rotary: Its rotary embedding.
        methods: The relation maps of this layer, innermost first.
        first_head: The index of this rank's first KV head in the whole model.
        step: The state that the layers of the model share.
        keeps_keys: Whether rotated keys may be stored, because only this attention writes to the cache of the layer.
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
        self.rotated: RotatedKeys | None = None
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
        for number, start, stop, length in self.step.get_requests(metadata):
            first = max(self.first, length - (stop - start))
            if length <= first:
                continue
            if self.layout is None:
                self.layout = Layout(implementation, layer, cache)
                if self.keeps_keys and RotatedKeys.fits(self.layout, cache, self.step.layers):
                    self.rotated = RotatedKeys(self.layout, cache)
            blocks = self.step.blocks(metadata, number, -(-length // self.layout.tokens))
            if length - first == 1:
                request = Request(self.layout, cache, blocks, length, self.rotated)
                attended = self.compute_single(implementation, query[stop - 1], request)
                if attended is not None:
                    output[stop - 1] = attended
                    continue
            key, value = self.layout.gather(cache, blocks, length)
            rows = query[stop - (length - first) : stop].transpose(0, 1)[None]
            attended = self.compute_rows(implementation, rows, key, value, first)
            output[stop - (length - first) : stop] = attended[0].to(output.dtype)

    def are_all(self, layer: Any, metadata: Any, more: tuple[Any, ...]) -> bool:
        """Return whether all rows of a step will be replaced, and the engine's attention has no other effect.

        `more` are further arguments of the attention, such as scales of a quantized output.
        """
        writes_cache = getattr(getattr(layer, "attn_backend", None), "forward_includes_kv_cache_update", True)
        if writes_cache or any(argument is not None for argument in more):
            return False
        return all(length - (stop - start) >= self.first for _, start, stop, length in self.step.get_requests(metadata))

    def portable(self, name: str) -> Any:
        """Return a module of the checkpoint's code by name."""
        return sys.modules[f"{type(self.part).__module__.rpartition('.')[0]}.{name}"]

    def make_call(self, query: torch.Tensor, first: int, length: int, heads: int) -> Any:
        """Build the call of a layer for the rows from `first` in a request of `length` tokens."""
        frame = self.portable("modeling_family").frame_of(self.rotary, None, query)
        portable = self.portable("method")
        positions = torch.arange(first, length, device=query.device)[None]
        tables = portable.Tables(None, [], positions, frame, self.step.memory(length - first, length))
        call = portable.Call(self.part, self.attention, tables, {})
        call.kv_heads, call.first_head = heads, self.first_head
        return call

    def compute_single(self, implementation: Any, query: torch.Tensor, request: Request) -> torch.Tensor | None:
        """Compute the output (h, d) of a request's last row (h, d) by `SingleRows`; None if that is not possible."""
        if len(self.methods) > 1 or special_of(implementation):
            return None
        call = self.make_call(query, request.length - 1, request.length, request.layout.heads)
        (method,) = self.methods
        if not self.step.single.can_attend(method, call, request.layout.size):
            return None
        return self.step.single.attend(method, call, query, request, implementation.scale)

    def compute_rows(
        self, implementation: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, first: int
    ) -> torch.Tensor:
        """Compute the output (1, l, h, d) of a request's last l rows (1, h, l, d), keys and values (1, g, n, d)."""
        call = self.make_call(query, first, key.shape[2], key.shape[1])
        options = {"scaling": implementation.scale, **special_of(implementation)}
        inner = functools.partial(_attend_row, self.portable("relation_parts"))
        for method in self.methods:
            inner = functools.partial(method.attend, inner, call)
        output: torch.Tensor = inner(query, key, value, None, **options)[0]
        return output


def special_of(implementation: Any) -> dict[str, Any]:
    """Return the soft cap and the sinks of a family's attention, by their names in the portable functions."""
    options = {"softcap": getattr(implementation, "logits_soft_cap", None) or None}
    options["s_aux"] = getattr(implementation, "sinks", None)
    return {name: option for name, option in options.items() if option is not None}


def _attend_row(
    parts: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: None, **options: Any
) -> tuple[torch.Tensor, None]:
    """Compute the attention of one row over all keys, as the inner attention of a relation map."""
    scores = parts.product(query, key.mT) * options["scaling"]
    return parts.apply_softmax(scores, value, mask, (0, 1), key.shape[2] - 1, None, options)[0], None
