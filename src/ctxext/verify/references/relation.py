"""Relation maps and row-wise schedules, pair by pair from their papers, which `recipes/relation.py` names."""

import math


def relation(step, m, n, inverse):
    """Angles of every pair of the query and of the key, or None where the key is not read. 0 <= n <= m."""
    length, method = step["original_length"], step["method"]
    own = [m * w for w in inverse], [n * w for w in inverse]

    def at(a, b):
        return [a * w for w in inverse], [b * w for w in inverse]

    if method == "adaptive":
        if m + 1 <= length:
            return own
        for factor, slower in zip(step["factors"], step["inverse_frequencies"], strict=True):
            if factor * length >= m + 1 or factor == step["factors"][-1]:
                slower = [w * s / b for w, s, b in zip(inverse, slower, step["base"], strict=True)]
                return [m * w for w in slower], [n * w for w in slower]
    if method in ("sinks", "window"):
        sinks = step.get("sinks", 0)
        kept = [*range(sinks), *range(max(sinks, m - step["window"] + 1), m + 1)] if m >= sinks else list(range(m + 1))
        # Positions within the cache: the keys that are left, counted from zero.
        return at(len(kept) - 1, kept.index(n)) if n in kept else None
    if method == "dca":
        size, chunk = step["chunk_size"], step["chunk_size"] - step["local"]
        if m < size:
            return own
        if m // chunk == n // chunk:
            return at(m % chunk, n % chunk)
        if m // chunk == n // chunk + 1:
            return at(min(m % chunk + chunk, size), n % chunk)
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
    query = [(m // group + shift) * w for group, shift, w in zip(groups, shifts, inverse, strict=True)]
    return query, [(n // group) * w for group, w in zip(groups, inverse, strict=True)]


def temperature(step, m):
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


def rotated_factor(step, m):
    """The factor on cos and sin, those of the query and of its keys alike, for the row at m."""
    if step["method"] != "adaptive" or "attention_factors" not in step or m + 1 <= step["original_length"]:
        return 1.0
    which = next((i for i, factor in enumerate(step["factors"]) if factor * step["original_length"] >= m + 1), -1)
    return step["attention_factors"][which]
