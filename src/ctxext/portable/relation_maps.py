"""The keys that a row reads, and their distances: the base class of maps, and the tiles of attention for a map.

This file travels inside checkpoints. A row is a query at position m; a key is at n. A row reads keys n < far as far
ones, middle <= n < near as middle ones and n >= near at their own distance; any between far and middle not at all.
A map gives the positions of the query and the key of such a pair, which need not be whole numbers. Everything depends
on the row's position, never on the call. Shapes: b batch, l rows, k keys, p rotated pairs.

A rung is the number of a table of positions for far keys, from 1; at rung 0 a row is as in the source model. Rows may
differ in it, as Self-Extend's in their group. Each rung among the rows of a call costs a turned copy of its far keys; a
cache keeps those of the last. Where scores are masked, the far product of a block of rows is computed again for every
rung in it, and a traced call, which cannot read positions, computes all of them for all rows.
"""

import itertools
import math
from collections import namedtuple
from typing import NamedTuple

import torch


class Beyond(NamedTuple):
    """A map's values for rows at m (b, l). Positions have the shape (b, l), or (b, l, p) with one for every pair."""

    rung: torch.Tensor  # (b, l), whole numbers: the table of far keys' positions that the row reads.
    far: torch.Tensor  # (b, l): the border below which keys are far. Borders are positions of keys.
    middle: torch.Tensor  # (b, l): the border from which keys are middle ones, up to `near`.
    near: torch.Tensor  # (b, l): the border from which keys are at their own distance.
    at_far: torch.Tensor  # The position of the query for far keys.
    at_middle: torch.Tensor | None = None  # The position of the query for middle keys, or None without any.


# Rows of equal rung with borders that are constant or move by one per row: numbers of rows and keys, for plans.
Run = namedtuple("Run", ["rung", "start", "stop", "far", "middle", "near", "far_moves", "near_moves"])


class Map:
    """Base class of maps. `start` is the first row with other distances, `first` the first that changes."""

    turns_keys = True  # Whether far keys are turned, or only queries.
    drops_keys = False  # Whether some keys are not read.

    def __init__(self, settings, start):
        self.length, self.temperature_name = settings["original_length"], settings.get("temperature", "none")
        self.start = start
        self.first = start if self.temperature_name == "none" else min(start, self.length)

    def beyond(self, m):
        """Return the Beyond of rows at positions m (b, l). Its values for rows before `start` are not read."""
        raise NotImplementedError

    def rows(self, m, rotated):
        """Return `beyond` for all positions m (b, l), which are rotated by other ones (b, l) where these differ."""
        changed, end = m >= self.start, m + 1
        rung, far, middle, near, at_far, at_middle = self.beyond(m)
        borders = (torch.where(changed, border.clamp(min=0), end) for border in (far, middle, near))
        if at_middle is not None:  # Middle keys do not turn, so the query moves by the difference.
            at_middle = chosen(changed, rotated + at_middle - m, rotated)
        at_far = chosen(changed, at_far if self.turns_keys else rotated + at_far - m, rotated)
        return Beyond(torch.where(changed, rung, 0), *borders, at_far, at_middle)

    def keys(self, n, rotated, rung):
        """Positions of keys at n (b, k), rotated by `rotated`, for far rows of a rung (b, 1): (b, k) or (b, k, p)."""
        return chosen(rung > 0, self.far_keys(n, rung.clamp(min=1)), rotated)

    def far_keys(self, n, rung):
        """The same for rungs of at least 1."""
        return n

    def slowed(self, rung):
        """The factors on the frequencies of far pairs of a rung (b, l): (b, l, p), or None for 1."""
        return

    def last_rung(self, length):
        """The highest rung among the first `length` positions."""
        return 1

    def temperature(self, m):
        """The factor on the query of each row m (b, l), float32, or None for 1. Inside the window it is 1."""
        ratio = (m + 1).clamp(min=self.length).float() / self.length
        if self.temperature_name == "yarn":
            return (0.1 * ratio.log() + 1) ** 2
        if self.temperature_name == "logn":
            return 1 + ratio.log() / math.log(self.length)
        if self.temperature_name == "llama4":
            return 1 + 0.1 * (1 + torch.div(m, self.length, rounding_mode="floor")).clamp(min=1).float().log()
        return None

    def loudness(self, m):
        """The factor on the rotary part of the query, or None."""
        return


def chosen(where, these, others):
    """`these` positions where `where` (b, l), else `others`: each (b, l), or (b, l, p) with one for every pair."""
    if 3 in (these.ndim, others.ndim):
        where, these, others = (x if x.ndim == 3 else x[..., None] for x in (where, these, others))
    return torch.where(where, these, others)


def floored(n, group):
    """The group's number, exact in whole numbers."""
    return torch.div(n, group, rounding_mode="floor")


def runs(rules, start, stop):
    """Yield Runs of the rows start to stop, at positions of the same numbers. All must be at least `first`."""
    m = torch.arange(start, stop, device="cpu")[None]
    rows = rules.rows(m, m)
    lines = [rows.rung[0], *(border[0] for border in (rows.far, rows.middle, rows.near))]
    cuts = torch.zeros(stop - start, dtype=torch.bool, device="cpu")
    for line, step in zip(lines, (0, 1, 1, 1), strict=True):
        cuts[1:] |= line.diff().abs() > step
    edges = [0, *cuts.nonzero().flatten().tolist(), stop - start]
    for a, b in itertools.pairwise(edges):
        rung, far, middle, near = (int(line[a]) for line in lines)
        moves = [b - a > 1 and int(line[a + 1] - line[a]) == 1 for line in (lines[1], lines[3])]
        yield Run(rung, start + a, start + b, far, middle, near, *moves)


def tiles(run):
    """Yield (part, first row, end, first key, end, form) of tiles that cover what the rows of a run read, near first.

    A "full" tile hides nothing, in a "causal" square row i sees the keys to i, and in a "band" those after i, as many
    as there are keys beyond its rows.
    """
    start, stop, width = run.start, run.stop, run.start - run.near + 1
    step = 64 if width < 512 else 256
    if run.near_moves and width > 0:
        for row in range(start, stop, step):
            end = min(row + step, stop)
            yield "near", row, end, row - width, end, "band"
    elif stop - start == 1:
        yield "near", start, stop, run.near, stop, "full"
    elif not run.near_moves:
        yield "near", start, stop, run.near, start, "full"
        yield "near", start, stop, start, stop, "causal"
    if not run.near_moves:
        yield "middle", start, stop, run.middle, run.near, "full"
    yield "far", start, stop, 0, run.far - int(run.far_moves), "full"
    if run.far_moves:
        yield "far", start, stop, run.far - 1, run.far - 1 + stop - start, "causal"


def stages(rules, start, stop):
    """For each rung of the rows start to stop: its number, how many keys are far for some row, and all tiles."""
    by_rung = []
    for rung, group in itertools.groupby(runs(rules, start, stop), lambda run: run.rung):
        shown = [tile for run in group for tile in tiles(run) if tile[3] < tile[4]]
        by_rung.append((rung, max((tile[4] for tile in shown if tile[0] == "far"), default=0), shown))
    return by_rung
