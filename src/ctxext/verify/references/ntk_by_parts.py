"""NTK-by-parts: Peng et al. 2023, section 3.2, as its authors released it."""

import math


def schedule(numbers, model, at):
    """Linear in the dimension's index, ends rounded outwards, bounds clamped at 0 and d - 1 as the runtime does."""
    d, base, length, s = model["span"], model["theta"], model["length"], numbers["factor"]

    def index(rotations):
        return d / 2 * math.log(length / (2 * math.pi * rotations)) / math.log(base)

    start, end = index(numbers["beta_fast"]), index(numbers["beta_slow"])
    if numbers.get("truncate", True):
        start, end = math.floor(start), math.ceil(end)
    start, end = max(0, start), min(d - 1, end)
    frequencies = []
    for i in range(model["dim"] // 2):
        theta = base ** (-2 * i / d)
        gone = 0.0 if i <= start else 1.0 if i >= end else (i - start) / (end - start)
        frequencies.append((1 - gone) * theta + gone * theta / s)
    return frequencies, 1.0
