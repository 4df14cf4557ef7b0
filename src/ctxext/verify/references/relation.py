"""Relation maps and row-wise schedules, pair by pair from their papers, which `recipes/methods/relation.py` names.

Where a paper moves the query and the key by as much, they stay: the distance is the same, and a family knows the angle
of a large position, in float32, to 0.03 only, so that what is moved would be another pair than the one that is not.
"""

import itertools
import math
import struct


def single(number):
    """The nearest float32, as families have positions and frequencies."""
    return struct.unpack("f", struct.pack("f", number))[0]


def relation(step, layer, m, n, inverse):
    """Angles of every pair of the query and of the key, or None where the key is not read. 0 <= n <= m."""
    length, method = step["original_length"], step["method"]
    own = [m * w for w in inverse], [n * w for w in inverse]

    def at(a, b):
        return [single(a) * w for w in inverse], [single(b) * w for w in inverse]

    if method == "adaptive":
        if m + 1 <= length:
            return own
        for factor, slower in zip(step["factors"], step["inverse_frequencies"], strict=True):
            if factor * length >= m + 1 or factor == step["factors"][-1]:
                # Families that fill up with frequencies of 0 have more of them than the schedule.
                both = itertools.zip_longest(inverse, slower, step["base"], fillvalue=0.0)
                slower = [single(w * (s / b)) if b else w for w, s, b in both]
                return [m * w for w in slower], [n * w for w in slower]
    if method in ("sinks", "window"):
        sinks = step.get("sinks", 0)
        gone = max(m - step["window"] + 1 - sinks, 0)
        if sinks <= n < sinks + gone:
            return None
        # Positions within the cache: the keys that are left, counted from zero. Among recent ones that moves both.
        return own if n >= sinks else at(m - gone, n)
    if method == "dca":
        size, chunk = step["chunk_size"], step["chunk_size"] - step["local"]
        if m < size:
            return own
        if m // chunk == n // chunk:
            return own  # At m mod c and n mod c: both moved by as much.
        if m // chunk == n // chunk + 1:
            return at(min(m % chunk + chunk, size) + n // chunk * chunk, n)  # At n mod c: the same.
        return at(size, n % chunk)
    if m < step.get("start", length):
        return own
    if method == "string":
        return own if m - n <= step["shift"] else at(m - step["shift"] + step["window"], n)
    window = step["window"]
    if method == "rerope":
        return own if m - n < window else at(window, 0)
    if method == "self-extend":
        group = step.get("group")
        if group is None:
            group = 1
            while window + (length - window) * group < m + 1:
                group += 1
        return own if m - n < window else at(m // group + window - window / group, n // group)
    assert method == "bifocal"
    published = step.get("border", "published") == "published"
    if m - n < window or (published and m - n == window):
        return own
    # What is exact takes none of the far distances; a continuous border adds them up, and all must stay below L.
    exact = 0 if published else window
    groups = step.get("groups") or [math.ceil((m + 1 - exact) / (length - exact))] * len(inverse)
    shifts = [0.0 if published else window - window / group for group in groups]
    query = [single(m // group + shift) * w for group, shift, w in zip(groups, shifts, inverse, strict=True)]
    return query, [(n // group) * w for group, w in zip(groups, inverse, strict=True)]


def temperature(step, layer, m):
    """What the scores of the row at m are multiplied by."""
    length, name = step["original_length"], step.get("temperature", "none")
    if m + 1 <= length:
        return 1.0
    if name == "yarn":
        return (0.1 * math.log((m + 1) / length) + 1) ** 2
    if name == "logn":
        return math.log(m + 1) / math.log(length)
    if name == "llama4":
        return 1 + 0.1 * math.log(1 + m // length)
    return 1.0


def rotated_factor(step, layer, m):
    """The factor on cos and sin, those of the query and of its keys alike, for the row at m."""
    if step["method"] != "adaptive" or "attention_factors" not in step or m + 1 <= step["original_length"]:
        return 1.0
    which = next((i for i, factor in enumerate(step["factors"]) if factor * step["original_length"] >= m + 1), -1)
    return step["attention_factors"][which]


def places(step, reach):
    """Positions below `reach` that tell rules apart: those that matter most first.

    Rows at which a rule begins or changes, and for the last, the first changed and a middle one the keys at its
    borders, each with its neighbours.
    """
    length, last = step["original_length"], reach - 1
    first = max(step.get("start", length), step.get("chunk_size", 0) if step["method"] == "dca" else 0)
    if step["method"] in ("sinks", "window"):
        first = step.get("sinks", 0) + step["window"]
    middle = (first + last) // 2
    found = [last, first, 0, middle]
    for row in (last, first, middle):
        for key in borders(step, row):
            found += [key, key - 1, key + 1]
    for row in (first, *changes(step, reach)):
        found += [row - 1, row, row + 1]
    found += [last - 1, middle + 1, 1, 2, 3]
    return list(dict.fromkeys(position for position in found if 0 <= position < reach))


def borders(step, m):
    """The first key that the row at m reads as near, and others at which its rule for keys changes."""
    if step["method"] == "dca":
        chunk = step["chunk_size"] - step["local"]
        return [m // chunk * chunk, (m // chunk - 1) * chunk]
    if step["method"] == "adaptive":
        return []
    distance = step["shift"] if step["method"] == "string" else step["window"]
    groups = [group for group in [step.get("group"), *(step.get("groups") or [])] if group]
    grouped = [int(group) * (m // (2 * int(group))) for group in groups[:1]]
    return [m - distance, *([step["sinks"]] if step.get("sinks") else []), *grouped]


def changes(step, reach):
    """Rows at which a rule that depends on the row changes: the first, the last and some between."""
    length, method, rows = step["original_length"], step["method"], []
    if method == "adaptive":
        rows = [math.ceil(factor * length) for factor in step["factors"][:-1]]
    elif method == "dca":
        chunk = step["chunk_size"] - step["local"]
        rows = list(range(-(-step["chunk_size"] // chunk) * chunk, reach, chunk))
    elif method in ("self-extend", "bifocal") and not (step.get("group") or step.get("groups")):
        exact = 0 if step.get("border") == "published" else step["window"]
        rows = list(range(exact + length - exact, reach, length - exact))
    return [*rows[:1], *rows[-1:], *rows[1 : -1 : max(len(rows) // 4, 1)]]
