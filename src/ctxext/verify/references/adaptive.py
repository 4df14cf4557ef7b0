"""A schedule for every row: the smallest of several factors that holds it, from a table of frequencies."""

import itertools
import math

from .rows import places_of, single, temperature

__all__ = ["places", "relation", "rotated_factor", "temperature"]


def factor_of(settings, m):
    """Which factor the row at m uses, by its number; None for rows within the original context length."""
    if m + 1 <= settings["original_length"]:
        return None
    reaches = [factor * settings["original_length"] for factor in settings["factors"]]
    return next((number for number, reach in enumerate(reaches) if reach >= m + 1), len(reaches) - 1)


def relation(settings, layer, m, n, frequencies):
    """Query and key at their positions, both with the frequencies of the row's factor."""
    number = factor_of(settings, m)
    if number is not None:
        # Families that fill up with frequencies of 0 have more of them than the schedule.
        slowed, base = settings["inverse_frequencies"][number], settings["base"]
        triples = itertools.zip_longest(frequencies, slowed, base, fillvalue=0.0)
        frequencies = [single(w * (s / b)) if b else w for w, s, b in triples]
    return [m * w for w in frequencies], [n * w for w in frequencies]


def rotated_factor(settings, layer, m):
    """The factor on cos and sin, of the query and of its keys alike, for the row at m."""
    number = factor_of(settings, m)
    return 1.0 if number is None or "attention_factors" not in settings else settings["attention_factors"][number]


def places(settings, reach):
    """Around the rows from which another factor applies."""
    length = settings["original_length"]
    changes = [math.ceil(factor * length) for factor in settings["factors"][:-1]]
    return places_of(reach, length, lambda row: [], changes)
