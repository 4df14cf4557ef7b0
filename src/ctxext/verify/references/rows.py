"""What references of attention methods share: angles in float32, temperatures by row, and positions worth checking.

Where a paper moves the query and the key by the same amount, the references move neither: the distance is the same, and
a family knows the angle of a large position, in float32, to 0.03 only, so a pair that is moved would differ from one
that is not.
"""

import math
import struct


def single(number):
    """The nearest float32, the type in which families keep positions and frequencies."""
    return struct.unpack("f", struct.pack("f", number))[0]


def angles(position, frequencies):
    """The angle of every pair of dimensions at a position, which need not be a whole number."""
    return [single(position) * w for w in frequencies]


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
