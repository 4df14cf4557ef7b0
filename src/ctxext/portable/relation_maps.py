"""The keys that a query reads, and their distances: the base class of maps, and the tiles of attention for a map.

This file is copied into checkpoints. A query is at position m, a key at n. Keys n < far are far keys, keys
middle <= n < near middle keys, and keys n >= near are at their original distance. Keys between far and middle are not
read. A map computes the positions of the query and the key of a far or middle pair, which need not be whole numbers.
They depend on the position of the query, never on the call, so that every form of a call has the same result. Shapes: b
batch, l queries, k keys, p rotated pairs. In names, `rows` are query positions.

A level is the index of a table of positions for far keys, from 1. Queries at level 0 are as in the source model. Levels
may differ between queries, as in Self-Extend, where they are groups. Each level in a call costs a rotated copy of its
far keys; a cache stores those of the last level. If scores are masked, the far product of a block of queries is
computed again for every level in it. A traced call cannot read positions and computes all levels for all queries.
"""

import itertools
import math
from collections import namedtuple
from typing import NamedTuple

import torch


class Beyond(NamedTuple):
    """Values of a map for queries at m (b, l). Positions are (b, l)."""

    level: torch.Tensor  # (b, l), whole numbers: the level.
    far: torch.Tensor  # (b, l): the border below which keys are far. Borders are positions of keys.
    middle: torch.Tensor  # (b, l): the border from which keys are middle ones, up to `near`.
    near: torch.Tensor  # (b, l): the border from which keys are at their own distance.
    at_far: torch.Tensor  # The position of the query for far keys.
    at_middle: torch.Tensor | None = None  # The position of the query for middle keys, or None without any.


# Consecutive queries of equal level with borders that are constant or move by one per query: their first index and end,
# and for each border its key at the first query and whether it moves.
Run = namedtuple("Run", ["level", "start", "stop", "far", "middle", "near"])


class Map:
    """Base class of maps. `start` is the first query with other distances, `first` the first with other scores."""

    rotates_keys = True  # Whether far keys are rotated, or only queries.
    drops_keys = False  # Whether some keys are not read.

    def __init__(self, settings, start):
        self.length, self.temperature_name = settings["original_length"], settings.get("temperature", "none")
        self.start = start
        self.first = start if self.temperature_name == "none" else min(start, self.length)

    def beyond(self, m):
        """Return the Beyond of query positions m (b, l). Its values before `start` are not read."""
        raise NotImplementedError

    def rows(self, m, rotated):
        """Return `beyond` for all query positions m (b, l); `rotated` (b, l) are the positions of their rotation."""
        changed, end = m >= self.start, m + 1
        level, far, middle, near, at_far, at_middle = self.beyond(m)
        borders = (torch.where(changed, border.clamp(min=0), end) for border in (far, middle, near))
        if at_middle is not None:  # Middle keys are not rotated, so the query moves by the difference.
            at_middle = torch.where(changed, rotated + at_middle - m, rotated)
        at_far = torch.where(changed, at_far if self.rotates_keys else rotated + at_far - m, rotated)
        return Beyond(torch.where(changed, level, 0), *borders, at_far, at_middle)

    def keys(self, n, rotated, level):
        """Return the far positions (b, k) or (b, k, p) for a level (b, 1) of keys at n (b, k), rotated by `rotated`."""
        return torch.where(level > 0, self.far_keys(n, level.clamp(min=1)), rotated)

    def far_keys(self, n, level):
        """Return the positions of far keys at n (b, k) for levels of at least 1."""
        return n

    def frequency_factors(self, level):
        """Return the factors (b, l, p) on the frequencies of far pairs of a level (b, l), or None for 1."""
        return

    def last_level(self, length):
        """Return the highest level among the first `length` positions."""
        return 1

    def temperature(self, m):
        """Return the factor on the queries at m (b, l), float32, or None for 1. Within the original length it is 1."""
        ratio = (m + 1).clamp(min=self.length).float() / self.length
        if self.temperature_name == "yarn":
            return (0.1 * ratio.log() + 1) ** 2
        if self.temperature_name == "logn":
            return 1 + ratio.log() / math.log(self.length)
        if self.temperature_name == "llama4":
            return 1 + 0.1 * (1 + torch.div(m, self.length, rounding_mode="floor")).clamp(min=1).float().log()
        return None

    def rotary_temperature(self, m):
        """Return the factor on the rotary part of the queries at m, or None."""
        return


def floor_divide(n, group):
    """Return the index of the group of each position, exact for whole numbers."""
    return torch.div(n, group, rounding_mode="floor")


def runs(rules, start, stop):
    """Yield the Runs of queries at positions `start` to `stop`, which are also their indices; `start` >= `first`."""
    m = torch.arange(start, stop, device="cpu")[None]
    rows = rules.rows(m, m)
    levels, borders = rows.level[0], [border[0] for border in (rows.far, rows.middle, rows.near)]
    cuts = torch.zeros(stop - start, dtype=torch.bool, device="cpu")
    cuts[1:] = levels.diff() != 0
    for border in borders:
        step = border.diff()
        cuts[1:] |= (step < 0) | (step > 1) | ((step == 1) & (border[:-1] == 0))  # A band begins before its first key.
    for low, high in itertools.pairwise([*borders[1:], m[0] + 1]):  # All queries of a run read the same parts.
        cuts[1:] |= (low == high).diff()
    for border in borders:  # A run also ends where a border starts or stops to move.
        cuts[2:] |= (border.diff().diff() != 0) & ~cuts[1:-1]
    edges = [0, *cuts.nonzero().flatten().tolist(), stop - start]
    for a, b in itertools.pairwise(edges):
        moving = [(int(border[a]), b - a > 1 and int(border[a + 1] - border[a]) == 1) for border in borders]
        yield Run(int(levels[a]), start + a, start + b, *moving)


def tiles(run):
    """Yield (part, first query, end, first key, end, form) of tiles that cover the keys of a run, near ones first.

    A "full" tile hides no key. In a "causal" square query i sees the keys up to i. In a "band" it sees the keys after
    i: as many as the tile has more keys than queries.
    """
    end = run.start + 1, run.stop - run.start > 1
    yield from cover_keys("near", run.start, run.stop, run.near, end)
    yield from cover_keys("middle", run.start, run.stop, run.middle, run.near)
    yield from cover_keys("far", run.start, run.stop, (0, False), run.far)


def cover_keys(part, start, stop, low, high):
    """Yield tiles of the keys between two borders: each is its key at the first query and whether it moves."""
    (low, low_moves), (high, high_moves) = low, high
    if low_moves and high_moves:
        width = high - low
        step = 64 if width < 512 else 256
        for row in range(start, stop, step) if width > 0 else ():
            end = min(row + step, stop)
            first = low - 1 + row - start
            yield part, row, end, first, first + width + end - row, "band"
    elif low_moves:
        for row in range(start, stop):
            yield part, row, row + 1, low + row - start, high, "full"
    else:
        yield part, start, stop, low, high - int(high_moves), "full"
        if high_moves:
            yield part, start, stop, high - 1, high - 1 + stop - start, "causal"


def stages(rules, start, stop):
    """Return each level of the query positions `start` to `stop`, its number of far keys, and its tiles."""
    by_level = []
    for level, group in itertools.groupby(runs(rules, start, stop), lambda run: run.level):
        shown = [tile for run in group for tile in tiles(run) if tile[3] < tile[4]]
        by_level.append((level, max((tile[4] for tile in shown if tile[0] == "far"), default=0), shown))
    return by_level
