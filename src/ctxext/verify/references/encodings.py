"""Methods for encodings other than RoPE: ALiBi slopes, buckets of distances, position tables."""

import math
from types import SimpleNamespace as Reference


def alibi_slopes(heads):
    """Return the slopes of ALiBi (2108.12409), as in the authors' get_slopes."""
    if math.log2(heads).is_integer():
        start = 2 ** (-(2 ** -(math.log2(heads) - 3)))
        return [start * start**i for i in range(heads)]
    closest = 2 ** math.floor(math.log2(heads))
    return alibi_slopes(closest) + alibi_slopes(2 * closest)[0::2][: heads - closest]


def row_factor(settings, m):
    """Return the factor of the query at m: constant, or its context length over the original length."""
    return settings["factor"] or max(1, (m + 1) / settings["original_length"])


def ntk_alibi(settings, heads, m):
    """Return the slopes of NTK-ALiBi (keezen/ntk_alibi): their base changes.

    The steepest slope stays and the gentlest is divided by s. Heads are ordered by slope, the steepest first.
    """
    plain = alibi_slopes(heads)
    if heads == 1:
        return plain
    shrink = row_factor(settings, m) ** (1 / (heads - 1))
    return [slope / shrink ** sum(steeper > slope for steeper in plain) for slope in plain]


def bucket(numbers, source, relative):
    """Return the bucket of a distance: T5 (1910.10683), section 2.1, and its code in Mesh TensorFlow.

    The result is not rounded down. `source` has the source's `distance`, and `num_buckets` and `bidirectional` of its
    stack.
    """
    distance, count, first = source["distance"] * numbers["factor"], source["num_buckets"], 0
    if source["bidirectional"]:
        count, first = count // 2, count // 2 if relative > 0 else 0
    away = abs(relative) if source["bidirectional"] else max(-relative, 0)
    exact = count // 2
    if away < exact:
        return first + away
    place = exact + math.log(away / exact) / math.log(distance / exact) * (count - exact)
    return first + min(place, count - 1)


def table(numbers, old, count):
    """Return a longer position table, by `fill`: `count` positions from the old table, tensors (positions, width)."""
    return FILLS[numbers["fill"]](numbers, old, count)


def tile(numbers, old, count):
    """Return a repeated table: section 5 of Longformer."""
    return old.repeat(math.ceil(count / len(old)), 1)[:count]


def linear(numbers, old, count):
    """Return a table by linear interpolation: position k is at k L / N in the old table."""
    new = []
    for k in range(count):
        at = min(k * len(old) / count, len(old) - 1)
        below = int(at)
        above = min(below + 1, len(old) - 1)
        new.append(old[below] + (at - below) * (old[above] - old[below]))
    return stack_rows(new)


def stack_rows(rows):
    """Stack rows to one tensor."""
    import torch

    return torch.stack(rows)


FILLS = {"tile": tile, "linear": linear}


def table_original(numbers, new, length, count):
    """Return the indices of the old positions in the new table, or None if it does not contain all of them."""
    if numbers["fill"] == "tile":
        return list(range(length))
    return [i * count // length for i in range(length)] if count % length == 0 else None


def sinusoidal(numbers, old, count):
    """Return a table of sines, then cosines, of p for position p: Vaswani et al. 2017, section 3.5."""
    width = old.shape[1]
    angles = [[p / 10000 ** (2 * i / width) for i in range(width // 2)] for p in range(count)]
    return old.new_tensor([[math.sin(a) for a in row] + [math.cos(a) for a in row] for row in angles])


def sinusoidal_original(numbers, new, length, count):
    """Return the indices of the old positions, which come first."""
    return list(range(length))


REFERENCES = {
    "table": Reference(rows=table, original=table_original),
    "range": Reference(rows=sinusoidal, original=sinusoidal_original),
    "ntk-alibi": Reference(slopes=ntk_alibi),
    "buckets": Reference(bucket=bucket),
    "declare": Reference(),  # No formula: the rotation must equal that of the source.
}
