"""Methods that change the distance between a query and a key, the keys that are read, or the factor on scores.

If a paper moves the query and the key by the same amount, the references move neither: the distance is the same, but
angles of large positions in float32 have errors up to 0.03, so a moved pair would differ from one that is not.
"""

import itertools
import math
import struct
from types import SimpleNamespace as Reference


def single(number):
    """Return the nearest float32, the type of positions and frequencies in transformers."""
    return struct.unpack("f", struct.pack("f", number))[0]


def angles(position, frequencies):
    """Return the angle of every pair of dimensions at a position, possibly fractional."""
    return [single(position) * w for w in frequencies]


def in_place(settings, layer, m, n, frequencies):
    """Return the angles of query and key at their own positions."""
    return [m * w for w in frequencies], [n * w for w in frequencies]


def temperature(settings, layer, m):
    """Return the factor on the scores of the query at m, by the rule of `--temperature`."""
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
    """Return the positions below `reach` that distinguish two rules, most important first.

    These are the query positions where a rule begins or changes, and the keys at the borders of the last, the first
    changed and a middle query position, each with its neighbours.

    Args:
        reach: The context length after the step.
        first: The first query position with a changed distance.
        borders: Called with a query position, returns the keys where its rule changes.
        changes: The query positions where the rule changes; a few of them are used.
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
    """Return the angles of Self-Extend (Jin et al. 2024, section 3 and algorithm 1): far keys by groups.

    The group depends on the query position by default.
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
    """Return the positions around the window's border, a border of groups, and the queries where groups grow."""
    length, window, group = settings["original_length"], settings["window"], settings.get("group")

    def borders(row):
        return [row - window, *([group * (row // (2 * group))] if group else [])]

    return places_of(reach, length, borders, () if group else range(length, reach, length - window))


def bifocal(settings, layer, m, n, frequencies):
    """Return the angles of bifocal attention (Jet-Long 2026, section 3), with a continuous border.

    Keys within the window are at their true distance, all others at grouped ones.
    """
    length, window = settings["original_length"], settings["window"]
    if m < length or m - n < window:
        return in_place(settings, layer, m, n, frequencies)
    # As published, far distances start from 0; a continuous border adds the window, and all must stay below L.
    group = math.ceil((m + 1 - window) / (length - window))
    return angles(m // group + window - window / group, frequencies), angles(n // group, frequencies)


def bifocal_places(settings, reach):
    """Return the positions around the window's border, and the queries where groups grow."""
    length, window = settings["original_length"], settings["window"]
    return places_of(reach, length, lambda row: [row - window], range(length, reach, length - window))


def rerope(settings, layer, m, n, frequencies):
    """Return the angles of ReRoPE (Su 2023).

    Keys within the window are at their true distance, all others at the window's.
    """
    if m < settings["original_length"] or m - n < settings["window"]:
        return in_place(settings, layer, m, n, frequencies)
    return angles(settings["window"], frequencies), angles(0, frequencies)


def rerope_places(settings, reach):
    """Return the positions around the window's border."""
    return places_of(reach, settings["original_length"], lambda row: [row - settings["window"]])


def dca(settings, layer, m, n, frequencies):
    """Return the angles of dual chunk attention (An et al. 2024, sections 3.1 to 3.3).

    Keys of the same chunk are at their true distance; the previous chunk and earlier ones have separate rules.
    """
    size, chunk = settings["chunk_size"], settings["chunk_size"] - settings["local"]
    # Within a chunk the paper uses positions in the chunk, which have the same distance.
    if m < size or m // chunk == n // chunk:
        return in_place(settings, layer, m, n, frequencies)
    if m // chunk == n // chunk + 1:  # The paper has the key at n mod c: both are moved equally.
        return angles(min(m % chunk + chunk, size) + n // chunk * chunk, frequencies), angles(n, frequencies)
    return angles(size, frequencies), angles(n % chunk, frequencies)


def dca_places(settings, reach):
    """Return the positions around the borders of the query's chunk and the previous one, and the starts of chunks."""
    size, chunk = settings["chunk_size"], settings["chunk_size"] - settings["local"]

    def borders(row):
        return [row // chunk * chunk, (row // chunk - 1) * chunk]

    first = max(settings["original_length"], size)
    return places_of(reach, first, borders, range(-(-size // chunk) * chunk, reach, chunk))


def sinks(settings, layer, m, n, frequencies):
    """Return the angles of attention sinks (Xiao et al. 2023, section 3.2), by positions in the cache, or None.

    The first keys are at their distance within the cache, the most recent ones at their true distance. Keys in between
    are not read: None.
    """
    count = settings["sinks"]
    dropped = max(m - settings["window"] + 1 - count, 0)
    if count <= n < count + dropped:
        return None
    # Positions within the cache number the remaining keys from 0, which moves query and recent keys equally.
    if n >= count:
        return in_place(settings, layer, m, n, frequencies)
    return angles(m - dropped, frequencies), angles(n, frequencies)


def sinks_places(settings, reach):
    """Return the positions around the first key of the window, and the last of the first tokens."""

    def borders(row):
        return [row - settings["window"], *([settings["sinks"]] if settings["sinks"] else [])]

    return places_of(reach, settings["sinks"] + settings["window"], borders)


def window(settings, layer, m, n, frequencies):
    """Return the angles of a sliding window: keys within it at their true distance; None for all others."""
    return None if n <= m - settings["window"] else in_place(settings, layer, m, n, frequencies)


def window_places(settings, reach):
    """Return the positions around the first key of the window."""
    return places_of(reach, settings["window"], lambda row: [row - settings["window"]])


def adaptive(settings, layer, m, n, frequencies):
    """Return the angles at the frequencies of the smallest sufficient of several factors, chosen for each query."""
    number = factor_of(settings, m)
    if number is not None:
        # Families that pad with frequencies of 0 have more of them than the schedule.
        slowed, base = settings["inverse_frequencies"][number], settings["base"]
        triples = itertools.zip_longest(frequencies, slowed, base, fillvalue=0.0)
        frequencies = [single(w * (s / b)) if b else w for w, s, b in triples]
    return in_place(settings, layer, m, n, frequencies)


def factor_of(settings, m):
    """Return the index of the adaptive factor of the query at m, or None within the original context length."""
    if m + 1 <= settings["original_length"]:
        return None
    reaches = [factor * settings["original_length"] for factor in settings["factors"]]
    return next((number for number, reach in enumerate(reaches) if reach >= m + 1), len(reaches) - 1)


def adaptive_rotated_factor(settings, layer, m):
    """Return the factor on cos and sin for the query at m, applied to the query and its keys."""
    number = factor_of(settings, m)
    return 1.0 if number is None or "attention_factors" not in settings else settings["attention_factors"][number]


def adaptive_places(settings, reach):
    """Return the positions around the queries from which another factor applies."""
    length = settings["original_length"]
    changes = [math.ceil(factor * length) for factor in settings["factors"][:-1]]
    return places_of(reach, length, lambda row: [], changes)


def distance_aware(settings, layer, numbers, head, m, n):
    """Return the factor of distance-aware attention (arXiv 2010.06925, section 3.2) on a positive score.

    `numbers` has two values per head.
    """
    w, v = numbers[0][head], numbers[1][head]
    return (1 + math.exp(v)) / (1 + math.exp(v - w * (m - n) / settings["original_length"]))


REFERENCES = {
    "self-extend": Reference(relation=self_extend, places=self_extend_places, temperature=temperature),
    "bifocal": Reference(relation=bifocal, places=bifocal_places, temperature=temperature),
    "dca": Reference(relation=dca, places=dca_places, temperature=temperature),
    "rerope": Reference(relation=rerope, places=rerope_places, temperature=temperature),
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
