"""Quiet attention, the plain way."""


def relation(settings, m, n, frequencies):
    """All pairs at their own positions."""
    return [m * w for w in frequencies], [n * w for w in frequencies]


def temperature(settings, m):
    """The same number for every row."""
    return settings["loudness"]
