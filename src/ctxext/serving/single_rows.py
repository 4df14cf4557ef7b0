"""Attention of single rows, as decoding asks for them, read from the blocks of an engine's cache.

Keys are read a few blocks at a time, so that a step reads keys and values once, as the engine's kernel does. Far ones
are kept turned (`turned_keys.py`), or turned there. The waves that turn keys are computed once for each block, and
shared by all layers and steps. Shapes: h heads, g KV heads, r heads for each of them, d head dimensions, k blocks of s
tokens.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ctxext.serving.layout import Layout
from ctxext.serving.turned_keys import TurnedKeys

_PIECE, _PIECE_ELSEWHERE = 1 << 18, 1 << 24  # Numbers of keys that are read at once on processors, and elsewhere.
_ROOM = 1 << 26  # Numbers of waves that are kept.
_ROWS, _GROUPS = 16, 256  # Rows whose queries' turns are computed at once, and how many such groups are kept.
_MORE = 8  # Blocks that waves grow by.


@dataclass(frozen=True)
class Request:
    """A request's keys and values in a layer's cache: the numbers of its blocks, its tokens, and the turned keys."""

    layout: Layout
    cache: torch.Tensor
    numbers: list[int]
    length: int
    turned: TurnedKeys | None = None

    @property
    def step(self) -> int:
        """How many blocks are read at once."""
        size = _PIECE if self.cache.device.type == "cpu" else _PIECE_ELSEWHERE
        of_block: int = self.layout.tokens * self.layout.heads * self.layout.size
        return max(1, size // of_block)

    def pieces(
        self, part: int, low: int, high: int, turned: TurnedKeys | None = None
    ) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Blocks with the tokens from `low` to `high`: the first and the end, and keys or values (k, g, s, d)."""
        layout, end = self.layout, -(-high // self.layout.tokens)
        for first in range(low // layout.tokens, end, self.step) if low < high else ():
            stop = min(first + self.step, end)
            numbers = self.numbers[first:stop]
            yield first, stop, layout.blocks(self.cache, part, numbers) if turned is None else turned.blocks(numbers)


class SingleRows:
    """What single rows of all layers and steps share: the turns of queries, and the waves that turn far keys."""

    def __init__(self) -> None:
        self.inverse: torch.Tensor | None = None
        self.changes = 0  # How often the frequencies changed.
        self.ahead: OrderedDict[Any, Any] = OrderedDict()
        self.waves: OrderedDict[Any, list[torch.Tensor]] = OrderedDict()
        self.partners: dict[Any, Any] = {}

    def can_attend(self, method: Any, call: Any, size: int) -> bool:
        """Whether this method's rows can be computed here: all heads of `size` dimensions turn alike, in pairs."""
        inverse = call.tables.frame.inverse
        if self.inverse is None or not torch.equal(self.inverse, inverse):
            self.inverse = inverse.clone()
            self.changes += 1
            for kept in (self.ahead, self.waves, self.partners):
                kept.clear()
        if not (hasattr(method, "ahead") and call.rotates_heads_alike):
            return False
        name = tuple(map(id, call.methods)), size
        if name not in self.partners:
            self.partners[name] = partners(call, size)
        return self.partners[name] is not None

    def attend(self, method: Any, call: Any, query: torch.Tensor, request: Request, scale: float) -> torch.Tensor:
        """The output (h, d) of a request's last row (h, d)."""
        layout, rules = request.layout, method.maps.get(call.layer, method.map)
        rung, parts, matrix = self.row(method, call, rules, request.length - 1, query)
        queries = (query.float() @ matrix * scale).to(query.dtype).view(layout.heads, -1, len(parts), layout.size)
        count = -(-request.length // layout.tokens)
        scores = queries.new_full((*queries.shape[:2], count * layout.tokens), -torch.inf, dtype=torch.float32)
        for number, (name, low, high) in enumerate(parts):
            turns = name == "far" and low < high and rules.turns_keys and rung > 0
            kept = request.turned if turns else None
            if kept is not None:
                self.turn(method, call, rules, rung, request, -(-high // layout.tokens))
            turn = self.turning(method, call, rules, rung, request) if turns and kept is None else None
            for first, stop, key in request.pieces(0, low, high, kept):
                if turn is not None:
                    key = turned(key, turn[0][first:stop], turn[1][first:stop], turn[2])
                start = first * layout.tokens
                a, b = max(low, start), min(high, stop * layout.tokens)
                of_blocks = (queries[:, :, number] @ key.mT).permute(1, 2, 0, 3).flatten(2)
                scores[:, :, a:b] = of_blocks[:, :, a - start : b - start]
        shares = scores.softmax(-1).to(query.dtype).unflatten(2, (count, -1)).permute(2, 0, 1, 3)
        output = query.new_zeros(*queries.shape[:2], layout.size, dtype=torch.float32)
        for low, high in read(parts, layout.tokens):
            for first, stop, value in request.pieces(1, low, high):
                if stop == count:  # Numbers behind the last token may be anything.
                    value = value.clone()
                    value[-1, :, request.length - (count - 1) * layout.tokens :] = 0
                output += (shares[first:stop] @ value).sum(0)
        return output.flatten(0, 1).to(query.dtype)

    def row(self, method: Any, call: Any, rules: Any, m: int, like: torch.Tensor) -> tuple[int, list[Any], Any]:
        """The rung of the row at m, its parts (name, first key, end), and the matrix that turns its query for each."""
        group, at = divmod(m, _ROWS)
        name = id(rules), group, like.shape[-1], like.device
        if name not in self.ahead:
            self.ahead[name] = method.ahead(call, rules, group * _ROWS, like.shape[-1], like.device)
            if len(self.ahead) > _GROUPS:
                self.ahead.popitem(last=False)
        rows, _, borders, matrices = self.ahead[name]
        rung, far, middle, near = borders[at]
        parts = [("far", 0, far), ("middle", middle, near), ("near", near, m + 1)]
        return rung, [part for part in parts if part[0] != "middle" or rows.at_middle is not None], matrices[at]

    def turn(self, method: Any, call: Any, rules: Any, rung: int, request: Request, count: int) -> None:
        """Turn those of a request's first blocks that are not kept so."""
        kept, name = request.turned, (self.changes, id(rules), tuple(map(id, call.methods)), rung)
        assert kept is not None
        missing = kept.missing(name, request.numbers[:count])
        turn = self.turning(method, call, rules, rung, request) if missing else ()
        for start in range(0, len(missing), request.step):
            places = missing[start : start + request.step]
            numbers = [request.numbers[place] for place in places]
            key = request.layout.blocks(request.cache, 0, numbers)
            kept.keep(name, numbers, turned(key, turn[0][places], turn[1][places], turn[2]))

    def turning(self, method: Any, call: Any, rules: Any, rung: int, request: Request) -> tuple[Any, ...]:
        """Two waves (k, 1, s, d) of all far blocks of a rung, in the order of the cache, and the columns' partners."""
        layout, count = request.layout, len(request.numbers)
        name = id(rules), tuple(map(id, call.methods)), rung, layout.tokens, layout.size, request.cache.device
        partner = self.partners[name[1], layout.size]
        kept = self.waves.pop(name, [])
        have = len(kept[0]) if kept else 0
        if have < count:
            more = waves(method, call, rules, (rung, have * layout.tokens, (count + _MORE) * layout.tokens), partner)
            more = [wave.view(-1, 1, layout.tokens, layout.size) for wave in more]
            more = [torch.cat(pair) for pair in zip(kept, more, strict=True)] if kept else more
            kept = [layout.ordered(wave) for wave in more]
        self.waves[name] = kept
        while len(self.waves) > 1 and sum(2 * pair[0].numel() for pair in self.waves.values()) > _ROOM:
            self.waves.popitem(last=False)
        return *kept, partner


def read(parts: list[Any], tokens: int) -> list[tuple[int, int]]:
    """The spans of tokens in whose blocks anything is read."""
    (_, _, far), (_, near, _), (_, _, end) = parts[0], parts[1], parts[-1]
    if far == 0:
        return [(near, end)]
    return [(0, end)] if near // tokens <= -(-far // tokens) else [(0, far), (near, end)]


def turned(key: torch.Tensor, wave: torch.Tensor, other: torch.Tensor, partner: torch.Tensor) -> torch.Tensor:
    """Keys (k, g, s, d), turned by waves (k, 1, s, d): each column by itself and its partner."""
    wide = key.float()
    swapped = torch.index_select(wide, 3, partner, out=torch.empty_like(wide))
    return (wide * wave).addcmul_(swapped, other).to(key.dtype)


def partners(call: Any, size: int) -> torch.Tensor | None:
    """With which column each of `size` is rotated, itself if it is not, or None unless they rotate in pairs."""
    device = call.tables.frame.inverse.device
    at, since = torch.full((1, 1), 1, device=device), torch.zeros(1, 1, device=device, dtype=torch.long)
    matrix = call.turn(torch.eye(size, device=device)[None, :, None], at, since)[0, :, 0].T
    others = matrix.clone().fill_diagonal_(0) != 0
    partner = torch.where(others.any(-1), others.long().argmax(-1), torch.arange(size, device=device))
    is_paired = int(others.sum(-1).max()) <= 1 and torch.equal(partner[partner], torch.arange(size, device=device))
    return partner if is_paired else None


def waves(method: Any, call: Any, rules: Any, span: tuple[int, int, int], partner: torch.Tensor) -> list[torch.Tensor]:
    """What a far key's columns, and their partners, are multiplied by: two (n, d), of keys of a span (rung, from, to).

    Looked up by turning two vectors: ones in the first column of each pair, and in the other columns.
    """
    rung, low, high = span
    is_first = torch.arange(len(partner), device=partner.device) <= partner
    probe = torch.stack([is_first, ~is_first]).float()[None, :, None].expand(-1, -1, high - low, -1)
    of_first, of_other = method.turned_keys(call, rules, probe, low, rung)[0]
    return [torch.where(is_first, of_first, of_other), torch.where(is_first, of_other, of_first)]
