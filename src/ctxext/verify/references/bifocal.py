"""Bifocal attention: Jet-Long 2026, section 3, and its groups for each pair of dimensions (DPE, arXiv 2504.18857)."""

import math

from .rows import places_of, single, temperature

__all__ = ["places", "relation", "temperature"]


def relation(settings, layer, m, n, frequencies):
    """Keys within the window at their true distance, all others by groups; `border` says how the two meet."""
    length, window, published = settings["original_length"], settings["window"], is_published(settings)
    if m < length or m - n < window or (published and m - n == window):
        return [m * w for w in frequencies], [n * w for w in frequencies]
    # As published, far distances start from 0; a continuous border adds the window, and all must stay below L.
    exact = 0 if published else window
    groups = settings.get("groups") or [math.ceil((m + 1 - exact) / (length - exact))] * len(frequencies)
    shifts = [0.0 if published else window - window / group for group in groups]
    query = [single(m // group + shift) * w for group, shift, w in zip(groups, shifts, frequencies, strict=True)]
    return query, [(n // group) * w for group, w in zip(groups, frequencies, strict=True)]


def is_published(settings):
    """Whether distances jump at the window's border, as in the paper."""
    return settings.get("border", "published") == "published"


def places(settings, reach):
    """Around the window's border, a border of groups, and the rows from which groups are larger."""
    length, window, groups = settings["original_length"], settings["window"], settings.get("groups")

    def borders(row):
        return [row - window, *(int(group) * (row // (2 * int(group))) for group in (groups or [])[:1])]

    exact = 0 if is_published(settings) else window
    return places_of(reach, length, borders, () if groups else range(length, reach, length - exact))
