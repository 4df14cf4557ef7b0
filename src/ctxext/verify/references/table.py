"""Longer position tables: Longformer (tile), Su 2020 (hierarchical), and two ways to interpolate."""

import math


def rows(numbers, old, count):
    """The rows of `count` positions, a tensor (count, width), computed from the old ones, a tensor (L, width)."""
    return FILLS[numbers["fill"]](numbers, old, count)


def tile(numbers, old, count):
    """The whole table again and again: section 5 of Longformer."""
    return old.repeat(math.ceil(count / len(old)), 1)[:count]


def hierarchical(numbers, old, count):
    """With base vectors u_i = (p_i - a p_0) / (1 - a), row i L + j is a u_i + (1 - a) u_j."""
    a = numbers["alpha"]
    base = (old - a * old[0]) / (1 - a)
    return (a * base[:, None] + (1 - a) * base[None])[: math.ceil(count / len(old))].flatten(0, 1)[:count]


def linear(numbers, old, count):
    """Row k at k L / N of the old ones, on the straight line between its neighbours."""
    new = []
    for k in range(count):
        at = min(k * len(old) / count, len(old) - 1)
        below = int(at)
        above = min(below + 1, len(old) - 1)
        new.append(old[below] + (at - below) * (old[above] - old[below]))
    return _stacked(new)


def cubic(numbers, old, count):
    """The same on a cubic through four rows whose slopes are central differences (Catmull-Rom, Keys's a = -1/2)."""
    new, last = [], len(old) - 1
    for k in range(count):
        at = min(k * len(old) / count, last)
        i = int(at)
        t = at - i
        before, here, there, after = (old[min(max(i + step, 0), last)] for step in (-1, 0, 1, 2))
        slope, next_slope = (there - before) / 2, (after - here) / 2
        new.append(
            (2 * t**3 - 3 * t**2 + 1) * here
            + (t**3 - 2 * t**2 + t) * slope
            + (3 * t**2 - 2 * t**3) * there
            + (t**3 - t**2) * next_slope
        )
    return _stacked(new)


def original(numbers, new, length, count):
    """Indices of the old rows in the new table; None if they are not all in it."""
    if numbers["fill"] in ("tile", "hierarchical"):
        return list(range(length))
    return [i * count // length for i in range(length)] if count % length == 0 else None


def _stacked(new):
    import torch

    return torch.stack(new)


FILLS = {"tile": tile, "hierarchical": hierarchical, "linear": linear, "cubic": cubic}
