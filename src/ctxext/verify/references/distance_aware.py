"""Distance-aware attention, pair by pair: arXiv 2010.06925, section 3.2, on scores above zero."""

import math


def relation(settings, layer, m, n, frequencies):
    """Query and key at their positions."""
    return [m * w for w in frequencies], [n * w for w in frequencies]


def temperature(settings, layer, m):
    """The method has none."""
    return 1.0


def factor(settings, layer, numbers, head, m, n):
    """By what a score above zero is multiplied, given the two numbers of every head."""
    w, v = numbers[0][head], numbers[1][head]
    return (1 + math.exp(v)) / (1 + math.exp(v - w * (m - n) / settings["original_length"]))
