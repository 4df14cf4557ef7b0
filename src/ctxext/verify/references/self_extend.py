"""Self-Extend: Jin et al. 2024, section 3 and algorithm 1, with the group chosen by the row where none is given."""

from .rows import angles, places_of, temperature

__all__ = ["places", "relation", "temperature"]


def relation(settings, layer, m, n, frequencies):
    """Keys within the window at their true distance, all others by groups."""
    length, window, group = settings["original_length"], settings["window"], settings.get("group")
    if m < length or m - n < window:
        return [m * w for w in frequencies], [n * w for w in frequencies]
    if group is None:
        group = 1
        while window + (length - window) * group < m + 1:
            group += 1
    return angles(m // group + window - window / group, frequencies), angles(n // group, frequencies)


def places(settings, reach):
    """Around the window's border, a border of groups, and the rows from which groups are larger."""
    length, window, group = settings["original_length"], settings["window"], settings.get("group")

    def borders(row):
        return [row - window, *([group * (row // (2 * group))] if group else [])]

    return places_of(reach, length, borders, () if group else range(length, reach, length - window))
