"""Methods for encodings other than RoPE: ALiBi slopes, buckets of distances, tables of positions or distances."""

import math
from types import SimpleNamespace as Reference

from .relative import xlnet_states


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
    """Return the bucket of a distance by the formula of the source, not rounded down.

    `source` has `formula`, the source's `distance`, and `num_buckets` and `bidirectional` of its stack.
    """
    return BUCKETS[source["formula"]](numbers, source, relative)


def deberta_bucket(numbers, source, relative):
    """Return the row of a distance in DeBERTa's table (2006.03654), by the code that was published with v2 and v3.

    A half of the buckets of each side has a single distance; the others are logarithmic and rounded up.
    """
    distance, span = round(source["distance"] * numbers["factor"]), source["num_buckets"] // 2
    half, away = span // 2, abs(relative)
    if away <= half:
        return span - relative
    place = math.log(away / half) / math.log((distance - 1) / half) * (half - 1)
    # The key precedes the query if `relative` is negative. Rounding x up is rounding x + 1 down, or -x.
    row = span + half + place + 1 if relative < 0 else span - half - place
    return min(max(row, 0), 2 * span - 1)


def t5_bucket(numbers, source, relative):
    """Return the bucket of a distance in T5 (1910.10683), section 2.1, and its code in Mesh TensorFlow."""
    distance, count, first = source["distance"] * numbers["factor"], source["num_buckets"], 0
    if source["bidirectional"]:
        count, first = count // 2, count // 2 if relative > 0 else 0
    away = abs(relative) if source["bidirectional"] else max(-relative, 0)
    exact = count // 2
    if away < exact:
        return first + away
    place = exact + math.log(away / exact) / math.log(distance / exact) * (count - exact)
    return first + min(place, count - 1)


BUCKETS = {"t5": t5_bucket, "deberta": deberta_bucket}


def table(numbers, old, count):
    """Return a longer table, by `fill`: `count` rows from the old table, tensors (rows, width).

    Rows are those of positions, or with `distances` of the distances from -count / 2 to count / 2 - 1.
    """
    if numbers.get("distances"):
        return distances(numbers, old, count)
    return FILLS[numbers["fill"]](numbers, old, count)


def distances(numbers, old, count):
    """Return a longer table of distances (Shaw et al. 1803.02155), each side by the rule of positions.

    With `linear` the distance d is at d * len(old) / count, so that distance 0 stays.
    """
    half, new = len(old) // 2, []
    behind, ahead = old[:half].flip(0), old[half:]
    if numbers["fill"] == "tile":
        return stack_rows([*tile(numbers, behind, count // 2).flip(0), *tile(numbers, ahead, count // 2)])
    for d in range(-(count // 2), count // 2):
        at = min(abs(d) * len(old) / count, half if d < 0 else half - 1)
        side = [ahead[0], *behind] if d < 0 else ahead
        below = int(at)
        above = min(below + 1, len(side) - 1)
        new.append(side[below] + (at - below) * (side[above] - side[below]))
    return stack_rows(new)


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
    """Return the indices of the old rows in the new table, or None if it does not contain all of them."""
    if numbers.get("distances"):
        step = 1 if numbers["fill"] == "tile" else count / length
        return [count // 2 + d * int(step) for d in range(-(length // 2), length // 2)] if step == int(step) else None
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
    "memory": Reference(states=xlnet_states),
    "declare": Reference(),  # No formula: the rotation must equal that of the source.
}
