"""What every relation method defines, pair by pair from the papers, in floats and loops, without code of the package.

`relation` says for a query at m and a key at n by which angles each is rotated from scratch, or that the key is not
read; `temperature` what the row's scores are multiplied by. `attention` loops over both. Step settings are those of the
checkpoint's configuration.
"""

import functools

import numpy as np

from ctxext.recipes import method_named
from ctxext.verify.reference import reference_of


@functools.cache
def reference_named(name):
    return reference_of(method_named(name))


def relation(step, layer, m, n, frequencies):
    return reference_named(step["method"]).relation(step, layer, m, n, frequencies)


def temperature(step, layer, m):
    return reference_named(step["method"]).temperature(step, layer, m)


def rotated_factor(step, layer, m):
    factor = getattr(reference_named(step["method"]), "rotated_factor", None)
    return 1.0 if factor is None else factor(step, layer, m)


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
        pairs = [(j, relation(step, 0, positions[i], positions[j], inverse)) for j in visible]
        pairs = [(j, pair) for j, pair in pairs if pair is not None]
        for group in range(groups):
            turned = np.stack([rotate(key[group, j], pair[1], interleaved) for j, pair in pairs])
            for head in range(group * heads // groups, (group + 1) * heads // groups):
                queries = np.stack([rotate(query[head, i], pair[0], interleaved) for _, pair in pairs])
                products, size = queries * turned, 2 * len(inverse)
                scores = products[:, :size].sum(-1) * rotated_factor(step, 0, positions[i]) ** 2
                scores = scores + products[:, size:].sum(-1)
                scores = scores * scaling * temperature(step, 0, positions[i])
                weights = np.exp(scores - scores.max())
                out[head, i] = weights / weights.sum() @ np.stack([value[group, j] for j, _ in pairs])
    return out
