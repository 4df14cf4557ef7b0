"""Resonance RoPE on YaRN: Wang et al. 2024, section 4."""

import math


def schedule(numbers, model, at):
    """YaRN's wavelengths, each rounded to the nearest whole number."""
    d, base, length, s = model["span"], model["theta"], model["length"], numbers["factor"]

    def index(rotations):
        return d / 2 * math.log(length / (2 * math.pi * rotations)) / math.log(base)

    if s == 1:
        return [base ** (-2 * i / d) for i in range(model["dim"] // 2)], 1.0
    start, end = max(0, math.floor(index(numbers["beta_fast"]))), min(d - 1, math.ceil(index(numbers["beta_slow"])))
    frequencies = []
    for i in range(model["dim"] // 2):
        gone = 0.0 if i <= start else 1.0 if i >= end else (i - start) / (end - start)
        theta = base ** (-2 * i / d)
        wavelength = 2 * math.pi / ((1 - gone) * theta + gone * theta / s)
        frequencies.append(2 * math.pi / max(round(wavelength), 1))
    return frequencies, 0.1 * math.log(s) + 1
