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


def rotate(vectors, angles, interleaved=False):
    """Rotate the first 2 p entries of vectors (..., d) by angles (p,) or (..., p)."""
    size = 2 * np.shape(angles)[-1]
    first, second = (
        (slice(0, size, 2), slice(1, size, 2)) if interleaved else (slice(size // 2), slice(size // 2, size))
    )
    cos, sin = np.cos(angles), np.sin(angles)
    out = np.array(np.broadcast_to(vectors, (*np.shape(angles)[:-1], vectors.shape[-1])), dtype=np.float64)
    a, b = vectors[..., first], vectors[..., second]
    out[..., first], out[..., second] = a * cos - b * sin, b * cos + a * sin
    return out


def attention(step, query, key, value, positions, inverse, *, scaling, seen=None, interleaved=False, rows=None):
    """Output (h, l, d) of un-rotated query (h, l, d), key and value (g, l, d), rows and keys at the same positions.

    `seen(i, j)` says whether row i may see key j; without it every earlier one. `rows`: only these are computed.
    """
    heads, groups, length = len(query), len(key), len(positions)
    out = np.zeros((heads, length, value.shape[-1]))
    for i in range(length) if rows is None else rows:
        pairs = {}
        for j in range(i + 1):
            angles = relation(step, 0, positions[i], positions[j], inverse) if seen is None or seen(i, j) else None
            if angles is not None:
                pairs[j] = angles
        read, (of_query, of_key) = [*pairs], (np.array(angles) for angles in zip(*pairs.values(), strict=True))
        for head in range(heads):
            group = head * groups // heads
            products = rotate(query[head, i], of_query, interleaved) * rotate(key[group, read], of_key, interleaved)
            scores = products[:, : 2 * len(inverse)].sum(-1) * rotated_factor(step, 0, positions[i]) ** 2
            scores = (scores + products[:, 2 * len(inverse) :].sum(-1)) * scaling * temperature(step, 0, positions[i])
            weights = np.exp(scores - scores.max())
            out[head, i] = weights / weights.sum() @ value[group, read]
    return out
