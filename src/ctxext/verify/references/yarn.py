"""YaRN: Peng et al. 2023, sections 3.2 to 3.4."""

import math


def schedule(numbers, model, at):
    """NTK-by-parts with cos and sin times 0.1 · ln(s) + 1, or times the number that was given."""
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
    one, other = numbers.get("mscale"), numbers.get("mscale_all_dim")
    sharper = 0.1 * math.log(s) + 1
    if one and other:  # DeepSeek-V2, its released code.
        sharper = (0.1 * one * math.log(s) + 1) / (0.1 * other * math.log(s) + 1)
    return frequencies, numbers.get("attention_factor") or (sharper if s > 1 else 1.0)
