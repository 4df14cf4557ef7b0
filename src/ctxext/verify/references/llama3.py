"""Llama 3.1's scaling: its model code, 2024."""

import math


def schedule(numbers, model, at):
    """Long wavelengths divided, short ones kept, the rest blended."""
    low, high, s, length = numbers["low_freq_factor"], numbers["high_freq_factor"], numbers["factor"], model["length"]
    frequencies = []
    for i in range(model["dim"] // 2):
        theta = model["theta"] ** (-2 * i / model["span"])
        wavelength = 2 * math.pi / theta
        if wavelength < length / high:
            frequencies.append(theta)
        elif wavelength > length / low:
            frequencies.append(theta / s)
        else:
            smooth = (length / wavelength - low) / (high - low)
            frequencies.append((1 - smooth) * theta / s + smooth * theta)
    return frequencies, 1.0
