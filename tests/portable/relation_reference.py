"""What every relation method defines, pair by pair from the papers, in floats and loops. Shares no code with the package.

`relation` says for a query at m and a key at n by which angles each is rotated from scratch, or that the key is not
read; `temperature` what the row's scores are multiplied by. `attention` loops over both. Step settings are those of the
checkpoint's configuration.
"""

import math

import numpy as np


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
    groups = step.get("groups") or [math.ceil((m + 1) / length)] * len(inverse)
    shifts = [0.0 if published else window - window / group for group in groups]
    query = [(m // group + shift) * w for group, shift, w in zip(groups, shifts, inverse, strict=True)]
    return query, [(n // group) * w for group, w in zip(groups, inverse, strict=True)]


def temperature(step, m):
    """What the scores of the row at m are multiplied by."""
    length, name, own = step["original_length"], step.get("temperature", "none"), 1.0
    if m + 1 <= length:
        return 1.0
    if step["method"] == "adaptive" and "attention_factors" in step:
        which = next((i for i, factor in enumerate(step["factors"]) if factor * length >= m + 1), -1)
        own = step["attention_factors"][which] ** 2
    if name == "yarn":
        return own * (0.1 * math.log((m + 1) / length) + 1) ** 2
    if name == "logn":
        return own * math.log(m + 1) / math.log(length)
    if name == "llama4":
        return own * (1 + 0.1 * math.log(1 + m // length))
    return own


def rotate(vector, angles, interleaved=False):
    """Rotate the first 2 p entries of a vector by p angles."""
    size, out = len(angles), np.array(vector, dtype=np.float64)
    first, second = (
        (slice(0, 2 * size, 2), slice(1, 2 * size, 2)) if interleaved else (slice(0, size), slice(size, 2 * size))
    )
    a, b, cos, sin = vector[first], vector[second], np.cos(angles), np.sin(angles)
    out[first], out[second] = a * cos - b * sin, b * cos + a * sin
    return out


def attention(step, query, key, value, positions, inverse, *, scaling, seen=None, interleaved=False, rows=None):
    """Output (h, l, d) of un-rotated query (h, l, d), key and value (g, l, d), rows and keys at the same positions.

    `seen(i, j)` says whether row i may see key j; without it every earlier one. `rows`: only these are computed.
    """
    heads, groups, length = len(query), len(key), len(positions)
    out = np.zeros((heads, length, value.shape[-1]))
    for i in range(length) if rows is None else rows:
        visible = [j for j in range(i + 1) if seen is None or seen(i, j)]
        pairs = [(j, relation(step, positions[i], positions[j], inverse)) for j in visible]
        pairs = [(j, pair) for j, pair in pairs if pair is not None]
        for group in range(groups):
            turned = np.stack([rotate(key[group, j], pair[1], interleaved) for j, pair in pairs])
            for head in range(group * heads // groups, (group + 1) * heads // groups):
                queries = np.stack([rotate(query[head, i], pair[0], interleaved) for _, pair in pairs])
                scores = (queries * turned).sum(-1) * scaling * temperature(step, positions[i])
                weights = np.exp(scores - scores.max())
                out[head, i] = weights / weights.sum() @ np.stack([value[group, j] for j, _ in pairs])
    return out
