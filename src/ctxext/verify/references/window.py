"""A sliding window: every row reads the most recent keys only."""

from .rows import places_of, temperature

__all__ = ["places", "relation", "temperature"]


def relation(settings, layer, m, n, frequencies):
    """Keys within the window at their true distance, and no others."""
    if n <= m - settings["window"]:
        return None
    return [m * w for w in frequencies], [n * w for w in frequencies]


def places(settings, reach):
    """Around the first key of the window."""
    return places_of(reach, settings["window"], lambda row: [row - settings["window"]])
