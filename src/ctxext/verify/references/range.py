"""Sinusoidal position tables: Vaswani et al. 2017, section 3.5, with the sines before the cosines."""

import math


def rows(numbers, old, count):
    """Row p: sines and cosines of p, each pair at its frequency."""
    width = old.shape[1]
    angles = [[p / 10000 ** (2 * i / width) for i in range(width // 2)] for p in range(count)]
    return old.new_tensor([[math.sin(a) for a in row] + [math.cos(a) for a in row] for row in angles])


def original(numbers, new, length, count):
    """The old rows come first."""
    return list(range(length))
