"""ReRoPE: Su 2023, with positions of far keys all at the window."""

from .rows import angles, places_of, temperature

__all__ = ["places", "relation", "temperature"]


def relation(settings, layer, m, n, frequencies):
    """Keys within the window at their true distance, all others at the window's."""
    if m < settings["original_length"] or m - n < settings["window"]:
        return [m * w for w in frequencies], [n * w for w in frequencies]
    return angles(settings["window"], frequencies), angles(0, frequencies)


def places(settings, reach):
    """Around the window's border."""
    return places_of(reach, settings["original_length"], lambda row: [row - settings["window"]])
