"""STRING: An et al. 2024, section 4: far distances are shifted back to those that training saw often."""

from .rows import angles, places_of, temperature

__all__ = ["places", "relation", "temperature"]


def first_row(settings):
    """The first row whose far keys are shifted."""
    return settings.get("start", settings["original_length"])


def relation(settings, layer, m, n, frequencies):
    """Keys up to the shift at their true distance, all others nearer by the shift less the window."""
    if m < first_row(settings) or m - n <= settings["shift"]:
        return [m * w for w in frequencies], [n * w for w in frequencies]
    return angles(m - settings["shift"] + settings["window"], frequencies), angles(n, frequencies)


def places(settings, reach):
    """Around the border of the shift."""
    return places_of(reach, first_row(settings), lambda row: [row - settings["shift"]])
