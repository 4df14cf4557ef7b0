"""Methods that change at which distance a query reads a key, which keys it reads, or by what its scores are multiplied.

Where a paper moves the query and the key by the same amount, the references move neither: the distance is the same, and
a family knows the angle of a large position, in float32, to 0.03 only, so a pair that is moved would differ from one
that is not.
"""

import itertools
import math
import struct
from types import SimpleNamespace as Reference


def single(number):
    """The nearest float32, the type in which families keep positions and frequencies."""
    return struct.unpack("f", struct.pack("f", number))[0]


def angles(position, frequencies):
    """The angle of every pair of dimensions at a position, which need not be a whole number."""
    return [single(position) * w for w in frequencies]


def in_place(settings, layer, m, n, frequencies):
    """Query and key at their positions."""
    return [m * w for w in frequencies], [n * w for w in frequencies]


def temperature(settings, layer, m):
    """The factor on the scores of the row at m, by the rule that `--temperature` names."""
    length, rule = settings["original_length"], settings.get("temperature", "none")
    if m + 1 <= length:
        return 1.0
    if rule == "yarn":
        return (0.1 * math.log((m + 1) / length) + 1) ** 2
    if rule == "logn":
        return math.log(m + 1) / math.log(length)
    if rule == "llama4":
        return 1 + 0.1 * math.log(1 + m // length)
    return 1.0


def places_of(reach, first, borders, changes=()):
    """Positions below `reach` that tell two rules apart, those that matter most first.

    These are the rows at which a rule begins or changes, and the keys at the borders of the last row, of the first
    changed row and of one between, each with its neighbours.

    Args:
        reach: The context length after the step.
        first: The first row that reads a key elsewhere.
        borders: Called with a row: the keys at which its rule changes.
        changes: The rows at which a rule that depends on the row changes; some of many are taken.
    """
    last = reach - 1
    middle = (first + last) // 2
    positions = [last, first, 0, middle]
    for row in (last, first, middle):
        for key in borders(row):
            positions += [key, key - 1, key + 1]
    rows = list(changes)
    for row in (first, *rows[:1], *rows[-1:], *rows[1 : -1 : max(len(rows) // 4, 1)]):
        positions += [row - 1, row, row + 1]
    positions += [last - 1, middle + 1, 1, 2, 3]
    return list(dict.fromkeys(position for position in positions if 0 <= position < reach))


def self_extend(settings, layer, m, n, frequencies):
    """Self-Extend (Jin et al. 2024, section 3 and algorithm 1): keys beyond the window by groups.

    The row chooses the group if none is given.
    """
    length, window, group = settings["original_length"], settings["window"], settings.get("group")
    if m < length or m - n < window:
        return in_place(settings, layer, m, n, frequencies)
    if group is None:
        group = 1
        while window + (length - window) * group < m + 1:
            group += 1
    return angles(m // group + window - window / group, frequencies), angles(n // group, frequencies)


def self_extend_places(settings, reach):
    """Around the window's border, a border of groups, and the rows from which groups are larger."""
    length, window, group = settings["original_length"], settings["window"], settings.get("group")

    def borders(row):
        return [row - window, *([group * (row // (2 * group))] if group else [])]

    return places_of(reach, length, borders, () if group else range(length, reach, length - window))


def bifocal(settings, layer, m, n, frequencies):
    """Bifocal attention: Jet-Long 2026, section 3, and its groups for each pair of dimensions (DPE, arXiv 2504.18857).

    Keys within the window at their true distance, all others by groups; `border` specifies how the two meet.
    """
    length, window, published = settings["original_length"], settings["window"], has_published_border(settings)
    if m < length or m - n < window or (published and m - n == window):
        return in_place(settings, layer, m, n, frequencies)
    # As published, far distances start from 0; a continuous border adds the window, and all must stay below L.
    exact = 0 if published else window
    groups = settings.get("groups") or [math.ceil((m + 1 - exact) / (length - exact))] * len(frequencies)
    shifts = [0.0 if published else window - window / group for group in groups]
    query = [single(m // group + shift) * w for group, shift, w in zip(groups, shifts, frequencies, strict=True)]
    return query, [(n // group) * w for group, w in zip(groups, frequencies, strict=True)]


def has_published_border(settings):
    """Whether distances jump at the window's border, as in the paper."""
    return settings.get("border", "published") == "published"


def bifocal_places(settings, reach):
    """Around the window's border, a border of groups, and the rows from which groups are larger."""
    length, window, groups = settings["original_length"], settings["window"], settings.get("groups")

    def borders(row):
        return [row - window, *(int(group) * (row // (2 * int(group))) for group in (groups or [])[:1])]

    exact = 0 if has_published_border(settings) else window
    return places_of(reach, length, borders, () if groups else range(length, reach, length - exact))


def rerope(settings, layer, m, n, frequencies):
    """ReRoPE (Su 2023): keys within the window at their true distance, all others at the window's."""
    if m < settings["original_length"] or m - n < settings["window"]:
        return in_place(settings, layer, m, n, frequencies)
    return angles(settings["window"], frequencies), angles(0, frequencies)


def rerope_places(settings, reach):
    """Around the window's border."""
    return places_of(reach, settings["original_length"], lambda row: [row - settings["window"]])


def dca(settings, layer, m, n, frequencies):
    """Dual chunk attention (An et al. 2024, sections 3.1 to 3.3).

    Keys of the same chunk at their true distance; the chunk before and earlier ones have other rules.
    """
    size, chunk = settings["chunk_size"], settings["chunk_size"] - settings["local"]
    # Within a chunk the paper reads both at their place in it, which is the same distance.
    if m < size or m // chunk == n // chunk:
        return in_place(settings, layer, m, n, frequencies)
    if m // chunk == n // chunk + 1:  # The paper reads the key at n mod c: both moved alike.
        return angles(min(m % chunk + chunk, size) + n // chunk * chunk, frequencies), angles(n, frequencies)
    return angles(size, frequencies), angles(n % chunk, frequencies)


def dca_places(settings, reach):
    """Around the borders of the row's chunk and of the one before, and the rows at which chunks begin."""
    size, chunk = settings["chunk_size"], settings["chunk_size"] - settings["local"]

    def borders(row):
        return [row // chunk * chunk, (row // chunk - 1) * chunk]

    first = max(settings["original_length"], size)
    return places_of(reach, first, borders, range(-(-size // chunk) * chunk, reach, chunk))


def string(settings, layer, m, n, frequencies):
    """STRING (An et al. 2024, section 4): far distances are shifted back to those that training saw often.

    Keys up to the shift at their true distance, all others nearer by the shift less the window.
    """
    if m < settings.get("start", settings["original_length"]) or m - n <= settings["shift"]:
        return in_place(settings, layer, m, n, frequencies)
    return angles(m - settings["shift"] + settings["window"], frequencies), angles(n, frequencies)


def string_places(settings, reach):
    """Around the border of the shift."""
    first = settings.get("start", settings["original_length"])
    return places_of(reach, first, lambda row: [row - settings["shift"]])


def sinks(settings, layer, m, n, frequencies):
    """Attention sinks (Xiao et al. 2023, section 3.2): the first tokens and the most recent, by positions in the cache.

    The first keys at their distance within the cache, recent ones at their true distance, and none between.
    """
    count = settings["sinks"]
    dropped = max(m - settings["window"] + 1 - count, 0)
    if count <= n < count + dropped:
        return None
    # Positions within the cache count the keys that are left from zero, which moves query and recent keys alike.
    if n >= count:
        return in_place(settings, layer, m, n, frequencies)
    return angles(m - dropped, frequencies), angles(n, frequencies)


def sinks_places(settings, reach):
    """Around the first key of the window, and the last of the first tokens."""

    def borders(row):
        return [row - settings["window"], *([settings["sinks"]] if settings["sinks"] else [])]

    return places_of(reach, settings["sinks"] + settings["window"], borders)


def window(settings, layer, m, n, frequencies):
    """A sliding window: keys within it at their true distance, and no others."""
    return None if n <= m - settings["window"] else in_place(settings, layer, m, n, frequencies)


def window_places(settings, reach):
    """Around the first key of the window."""
    return places_of(reach, settings["window"], lambda row: [row - settings["window"]])


def adaptive(settings, layer, m, n, frequencies):
    """A schedule for every row, the smallest of several factors that holds it: query and key with its frequencies."""
    number = factor_of(settings, m)
    if number is not None:
        # Families that fill up with frequencies of 0 have more of them than the schedule.
        slowed, base = settings["inverse_frequencies"][number], settings["base"]
        triples = itertools.zip_longest(frequencies, slowed, base, fillvalue=0.0)
        frequencies = [single(w * (s / b)) if b else w for w, s, b in triples]
    return in_place(settings, layer, m, n, frequencies)


def factor_of(settings, m):
    """Which of the adaptive factors the row at m uses, by its number; None within the original context length."""
    if m + 1 <= settings["original_length"]:
        return None
    reaches = [factor * settings["original_length"] for factor in settings["factors"]]
    return next((number for number, reach in enumerate(reaches) if reach >= m + 1), len(reaches) - 1)


def adaptive_rotated_factor(settings, layer, m):
    """The factor on cos and sin, of the query and of its keys alike, for the row at m."""
    number = factor_of(settings, m)
    return 1.0 if number is None or "attention_factors" not in settings else settings["attention_factors"][number]


def adaptive_places(settings, reach):
    """Around the rows from which another factor applies."""
    length = settings["original_length"]
    changes = [math.ceil(factor * length) for factor in settings["factors"][:-1]]
    return places_of(reach, length, lambda row: [], changes)


def distance_aware(settings, layer, numbers, head, m, n):
    """Distance-aware attention (arXiv 2010.06925, section 3.2): what multiplies a score above zero.

    `numbers` has two for every head.
    """
    w, v = numbers[0][head], numbers[1][head]
    return (1 + math.exp(v)) / (1 + math.exp(v - w * (m - n) / settings["original_length"]))


REFERENCES = {
    "self-extend": Reference(relation=self_extend, places=self_extend_places, temperature=temperature),
    "bifocal": Reference(relation=bifocal, places=bifocal_places, temperature=temperature),
    "dca": Reference(relation=dca, places=dca_places, temperature=temperature),
    "rerope": Reference(relation=rerope, places=rerope_places, temperature=temperature),
    "string": Reference(relation=string, places=string_places, temperature=temperature),
    "adaptive": Reference(
        relation=adaptive,
        rotated_factor=adaptive_rotated_factor,
        places=adaptive_places,
        temperature=temperature,
    ),
    "sinks": Reference(relation=sinks, places=sinks_places, temperature=temperature),
    "window": Reference(relation=window, places=window_places, temperature=temperature),
    "distance-aware": Reference(relation=in_place, factor=distance_aware, temperature=temperature),
}
