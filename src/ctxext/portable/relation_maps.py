"""Which keys a row reads at which distance: the map of every method, from positions alone.

This file travels inside checkpoints. A row is a query at position m; a key is at n. A row reads keys n < far as far
ones, middle <= n < near as middle ones and n >= near at their own distance; any between far and middle not at all.
A map says at which positions the query and the key of such a pair stand, which need not be whole numbers. All depends
on the row's own position, never on the call. Shapes: b batch, l rows, k keys, p rotated pairs.
"""

import itertools
import math
from collections import namedtuple

import torch

from .method import exact

# Of rows (b, l): the number of the key table that a row reads (0: the row is as in the source model), the borders, and
# where its query stands for middle and for far keys, (b, l) or (b, l, p). `at_middle` is None where there is no middle.
Rows = namedtuple("Rows", ["rung", "far", "middle", "near", "at_middle", "at_far"])
# Rows of equal rung whose borders stand still or move on by one with every row. Numbers of rows and keys, for plans.
Run = namedtuple("Run", ["rung", "start", "stop", "far", "middle", "near", "far_moves", "near_moves"])


class Map:
    """What all maps share. `start` is the first row that reads keys otherwise, `first` the first that changes."""

    turns_keys = True  # Whether far keys are turned, or only queries.
    drops_keys = False  # Whether some keys are not read.

    def __init__(self, settings, start):
        self.length, self.temperature_name = settings["original_length"], settings.get("temperature", "none")
        self.start = start
        self.first = start if self.temperature_name == "none" else min(start, self.length)

    def rows(self, m, rotated):
        """Return the Rows of positions m (b, l), which are rotated by other ones (b, l) where these differ."""
        changed, end = m >= self.start, m + 1
        rung, far, middle, near, at_middle, at_far = self.beyond(m)
        borders = (torch.where(changed, border.clamp(min=0), end) for border in (far, middle, near))
        if at_middle is not None:  # Its keys stay where they are rotated, so that the query moves by the difference.
            at_middle = chosen(changed, rotated + at_middle - m, rotated)
        at_far = chosen(changed, at_far if self.turns_keys else rotated + at_far - m, rotated)
        return Rows(torch.where(changed, rung, 0), *borders, at_middle, at_far)

    def keys(self, n, rotated, rung):
        """Where keys at n (b, k), rotated by `rotated`, stand for far rows of a rung (b, 1): (b, k) or (b, k, p)."""
        return chosen(rung > 0, self.far_keys(n, rung.clamp(min=1)), rotated)

    def far_keys(self, n, rung):
        """The same for rungs of at least 1."""
        return n

    def slowed(self, rung):
        """What frequencies are multiplied by where far pairs of a rung (b, l) stand, (b, l, p), or None for 1."""
        return

    def last_rung(self, length):
        """The highest rung among the first `length` positions."""
        return 1

    def temperature(self, m):
        """What the query of each row m (b, l) is multiplied by, float32, or None for 1. Inside the window it is 1."""
        ratio = (m + 1).clamp(min=self.length).float() / self.length
        if self.temperature_name == "yarn":
            return (0.1 * ratio.log() + 1) ** 2
        if self.temperature_name == "logn":
            return 1 + ratio.log() / math.log(self.length)
        if self.temperature_name == "llama4":
            return 1 + 0.1 * (1 + torch.div(m, self.length, rounding_mode="floor")).clamp(min=1).float().log()
        return None

    def loudness(self, m):
        """The same for what of the query rotates, or None."""
        return


def chosen(where, these, others):
    """These positions where (b, l) says so, else others: each (b, l), or (b, l, p) with one for every pair."""
    if 3 in (these.ndim, others.ndim):
        where, these, others = (x if x.ndim == 3 else x[..., None] for x in (where, these, others))
    return torch.where(where, these, others)


def floored(n, group):
    """The group's number, exact in whole numbers."""
    return torch.div(n, group, rounding_mode="floor")


class SelfExtend(Map):
    """Far keys at grouped positions that meet the near ones at the border. https://arxiv.org/abs/2401.01325.

    Rung and group are one: the smallest that the row's own length needs. With a fixed `group` the rung is 1.
    """

    def __init__(self, settings):
        self.window, self.group = settings["window"], settings.get("group")
        super().__init__(settings, max(settings["original_length"], self.window))

    def rung(self, m):
        """The row's group: w + (L - w) * group >= m + 1."""
        own = torch.div(m - self.window, self.length - self.window, rounding_mode="floor") + 1
        return own if self.group is None else torch.ones_like(m)

    def last_rung(self, length):
        """As in `rung`."""
        return 1 if self.group is not None else (length - 1 - self.window) // (self.length - self.window) + 1

    def beyond(self, m):
        """Rows of at least `start`; the query stands at `floor(m / group) + w - w / group`."""
        rung, near = self.rung(m), m - self.window + 1
        group = rung.clamp(min=1) if self.group is None else torch.full_like(m, self.group)
        return rung, near, near, near, None, floored(m, group) + (self.window - self.window / exact(group))

    def far_keys(self, n, rung):
        """At floor(n / group)."""
        return floored(n, rung if self.group is None else self.group)


class Bifocal(Map):
    """Near keys exact, far ones grouped, as Jet-Long has it (2607.07740). With `groups`, per pair: DPE (2504.18857).

    `border`: "published" reads d <= w as near, with a jump behind it; "continuous" shifts and groups as Self-Extend.
    """

    def __init__(self, settings):
        self.window, self.groups = settings["window"], settings.get("groups")
        self.is_continuous = settings.get("border", "published") == "continuous"
        self.exact = self.window * self.is_continuous  # What far distances begin behind.
        super().__init__(settings, max(settings["original_length"], self.window + 1))

    def last_rung(self, length):
        """As in `beyond`."""
        return 1 if self.groups else (length - 1 - self.exact) // (self.length - self.exact) + 1

    def grouped(self, n, rung):
        """Positions (b, k) and groups (b, 1) that broadcast, or (b, k, 1) and (p) with a group per pair."""
        return (n[..., None], torch.tensor(self.groups, device=n.device)) if self.groups else (n, rung)

    def beyond(self, m):
        """The group of a row is ceil((m + 1 - exact) / (L - exact))."""
        by_row = torch.div(m - self.exact, self.length - self.exact, rounding_mode="floor") + 1
        rung = torch.ones_like(m) if self.groups else by_row
        near = m - self.window + int(self.is_continuous)
        at, group = self.grouped(m, rung.clamp(min=1))
        return rung, near, near, near, None, floored(at, group) + (self.exact - self.exact / exact(group))

    def far_keys(self, n, rung):
        """At floor(n / group)."""
        return floored(*self.grouped(n, rung))


class DualChunk(Map):
    """Distances within a chunk and to the one before are exact, others count from a fixed row. 2402.17463."""

    def __init__(self, settings):
        self.size = settings["chunk_size"]
        self.chunk = self.size - settings["local"]
        super().__init__(settings, self.size)

    def beyond(self, m):
        """Keys of the chunk before are read from min(m mod c + c, size), earlier ones from `size`."""
        middle = (near := m - m % self.chunk) - self.chunk
        at_middle = (m - middle).clamp(max=self.size) + middle
        return torch.ones_like(m), middle, middle, near, at_middle, torch.full_like(m, self.size)

    def far_keys(self, n, rung):
        """At n mod c."""
        return n % self.chunk


class ReRoPE(Map):
    """Far keys all at one distance, the window's. Su 2023, https://kexue.fm/archives/9708."""

    def __init__(self, settings):
        self.window = settings["window"]
        super().__init__(settings, max(settings["original_length"], self.window))

    def beyond(self, m):
        """The query at w, keys at 0."""
        near = m - self.window + 1
        return torch.ones_like(m), near, near, near, None, torch.full_like(m, self.window)

    def far_keys(self, n, rung):
        """At 0."""
        return torch.zeros_like(n)


class String(Map):
    """Distances beyond `shift` are moved nearer, to begin again at `window`. https://arxiv.org/abs/2410.18745.

    `start` is the first row that does so, by default the first beyond the original context length.
    """

    turns_keys = False

    def __init__(self, settings):
        self.shift, self.window = settings["shift"], settings["window"]
        super().__init__(settings, max(settings.get("start", settings["original_length"]), self.shift + 1))

    def beyond(self, m):
        """Near is d <= shift; farther keys are at d - shift + window."""
        near = m - self.shift
        return torch.ones_like(m), near, near, near, None, m + (self.window - self.shift)


class Sinks(Map):
    """The first keys and the last `window`, at positions within what is read. https://arxiv.org/abs/2309.17453."""

    turns_keys, drops_keys = False, True

    def __init__(self, settings):
        self.sinks, self.window = settings.get("sinks", 0), settings["window"]
        super().__init__(settings, self.sinks + self.window)

    def beyond(self, m):
        """The query at sinks + window - 1 for the first keys."""
        near, at = m - self.window + 1, torch.full_like(m, self.sinks + self.window - 1)
        return torch.ones_like(m), torch.full_like(m, self.sinks), near, near, None, at


class Adaptive(Map):
    """Every row by the frequencies of its own length: those of the smallest factor >= (m + 1) / L.

    `inverse_frequencies` and `attention_factors` have one for each of the ascending `factors`; `base`: the model's.
    """

    def __init__(self, settings):
        base, self.ends = settings["base"], [factor * settings["original_length"] for factor in settings["factors"]]
        self.shares = [[1.0] * len(base)] + [
            [new / old if old else 1.0 for new, old in zip(row, base, strict=True)]
            for row in settings["inverse_frequencies"]
        ]
        self.scales = [1.0] + [float(factor) ** 2 for factor in settings.get("attention_factors", [])]
        super().__init__(settings, settings["original_length"])

    def rung(self, m):
        """The number of the row's factor, from 1."""
        return sum((m >= end).long() for end in self.ends[:-1]) + torch.ones_like(m)

    def last_rung(self, length):
        """One for each factor."""
        return len(self.ends)

    def beyond(self, m):
        """All keys are far, where they are."""
        return self.rung(m), m + 1, m + 1, m + 1, None, m

    def slowed(self, rung):
        """The frequencies of the rung over the model's."""
        kind = exact(torch.zeros(0, device=rung.device)).dtype
        return torch.tensor(self.shares, device=rung.device, dtype=kind)[rung]

    def loudness(self, m):
        """The attention factor of the row's rung squared: as YaRN has it, of what rotates alone."""
        if len(self.scales) == 1:
            return None
        return torch.tensor(self.scales, device=m.device)[torch.where(m >= self.start, self.rung(m), 0)]


MAPS = {
    **{"self-extend": SelfExtend, "bifocal": Bifocal, "dca": DualChunk, "rerope": ReRoPE},
    "string": String,
    "sinks": Sinks,
    "window": Sinks,
    "adaptive": Adaptive,
}


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
    made = []
    for rung, group in itertools.groupby(runs(rules, start, stop), lambda run: run.rung):
        found = [tile for run in group for tile in tiles(run) if tile[3] < tile[4]]
        made.append((rung, max((tile[4] for tile in found if tile[0] == "far"), default=0), found))
    return made
