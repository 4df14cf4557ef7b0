"""Which keys a row reads at which distance: the map of every method, from positions alone.

This file travels inside checkpoints. A row is a query at position m; a key is at n. A row reads keys n < far as far
ones, middle <= n < near as middle ones and n >= near at their own distance; any between far and middle not at all.
Queries and keys arrive rotated by their own positions, so a map says how much further each turns, in positions. All
depends on the row's own position, never on the call. Shapes: b batch, l rows, k keys, p rotated pairs.
"""

import itertools
import math
from collections import namedtuple

import torch

# Of rows (b, l): the number of the key table that a row reads (0: the row is as in the source model), the borders, and
# the turns of its query, (b, l) or (b, l, p). `turn_middle` is None for methods without a middle.
Rows = namedtuple("Rows", ["rung", "far", "middle", "near", "turn_middle", "turn_far"])
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

    def rows(self, m):
        """Return the Rows of positions m (b, l)."""
        changed, end = m >= self.start, m + 1
        rung, far, middle, near, turn_middle, turn_far = self.beyond(m)
        borders = (torch.where(changed, border.clamp(min=0), end) for border in (far, middle, near))
        if turn_middle is not None:
            turn_middle = torch.where(changed, turn_middle, 0)
        turn_far = torch.where(changed if turn_far.ndim == 2 else changed[..., None], turn_far, 0)
        return Rows(torch.where(changed, rung, 0), *borders, turn_middle, turn_far)

    def keys(self, n, rung):
        """How far keys at n (b, k) turn for far rows of a rung (b, 1): (b, k) or (b, k, p)."""
        turn = self.far_keys(n, rung.clamp(min=1))
        return torch.where(rung > 0 if turn.ndim == 2 else rung[..., None] > 0, turn, 0)

    def far_keys(self, n, rung):
        """The same for rungs of at least 1."""
        return torch.zeros_like(n)

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


def floored(n, group):
    """The way to the group's number, floor(n / group) - n, exact in whole numbers."""
    return torch.div(n, group, rounding_mode="floor") - n


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
        """Rows of at least `start`; the far turn is that of `floor(m / group) + w - w / group`."""
        rung, near = self.rung(m), m - self.window + 1
        group = rung.clamp(min=1) if self.group is None else self.group
        return rung, near, near, near, None, floored(m, group) + (self.window - self.window / group)

    def far_keys(self, n, rung):
        """To floor(n / group)."""
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
        group = self.grouped(m, rung.clamp(min=1))[1]
        return rung, near, near, near, None, floored(*self.grouped(m, group)) + self.exact - self.exact / group

    def far_keys(self, n, rung):
        """To floor(n / group)."""
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
        return torch.ones_like(m), middle, middle, near, (self.size + middle - m).clamp(max=0), self.size - m

    def far_keys(self, n, rung):
        """To n mod c."""
        return n % self.chunk - n


class ReRoPE(Map):
    """Far keys all at one distance, the window's. Su 2023, https://kexue.fm/archives/9708."""

    def __init__(self, settings):
        self.window = settings["window"]
        super().__init__(settings, max(settings["original_length"], self.window))

    def beyond(self, m):
        """The query at w, keys at 0."""
        near = m - self.window + 1
        return torch.ones_like(m), near, near, near, None, self.window - m

    def far_keys(self, n, rung):
        """To 0."""
        return -n


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
        return torch.ones_like(m), near, near, near, None, torch.full_like(m, self.window - self.shift)


class Sinks(Map):
    """The first keys and the last `window`, at positions within what is read. https://arxiv.org/abs/2309.17453."""

    turns_keys, drops_keys = False, True

    def __init__(self, settings):
        self.sinks, self.window = settings.get("sinks", 0), settings["window"]
        super().__init__(settings, self.sinks + self.window)

    def beyond(self, m):
        """The query at sinks + window - 1 for the first keys."""
        near = m - self.window + 1
        return torch.ones_like(m), torch.full_like(m, self.sinks), near, near, None, self.sinks + self.window - 1 - m


class Adaptive(Map):
    """Every row by the frequencies of its own length: those of the smallest factor >= (m + 1) / L.

    `inverse_frequencies` and `attention_factors` have one for each of the ascending `factors`; `base`: the model's.
    """

    def __init__(self, settings):
        base, self.ends = settings["base"], [factor * settings["original_length"] for factor in settings["factors"]]
        self.slower = [[0.0] * len(base)] + [
            [new / old - 1 if old else 0.0 for new, old in zip(row, base, strict=True)]
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
        """All keys are far: turned with the row's frequencies."""
        return (rung := self.rung(m)), m + 1, m + 1, m + 1, None, self.far_keys(m, rung)

    def far_keys(self, n, rung):
        """To n times the ratio of the frequencies."""
        return n[..., None] * torch.tensor(self.slower, device=n.device)[rung]

    def temperature(self, m):
        """The attention factor of the row's rung squared, times the general one."""
        general = super().temperature(m)
        if len(self.scales) == 1:
            return general
        own = torch.tensor(self.scales, device=m.device)[torch.where(m >= self.start, self.rung(m), 0)]
        return own if general is None else own * general


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
    rows = rules.rows(m)
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
