"""Attention sinks: Xiao et al. 2023, section 3.2: the first tokens and the most recent, by positions in the cache."""

from .rows import angles, places_of, temperature

__all__ = ["places", "relation", "temperature"]


def relation(settings, layer, m, n, frequencies):
    """The first keys at their distance within the cache, recent ones at their true distance, and none between."""
    sinks = settings["sinks"]
    dropped = max(m - settings["window"] + 1 - sinks, 0)
    if sinks <= n < sinks + dropped:
        return None
    # Positions within the cache count the keys that are left from zero, which moves query and recent keys alike.
    if n >= sinks:
        return [m * w for w in frequencies], [n * w for w in frequencies]
    return angles(m - dropped, frequencies), angles(n, frequencies)


def places(settings, reach):
    """Around the first key of the window, and the last of the first tokens."""

    def borders(row):
        return [row - settings["window"], *([settings["sinks"]] if settings["sinks"] else [])]

    return places_of(reach, settings["sinks"] + settings["window"], borders)
