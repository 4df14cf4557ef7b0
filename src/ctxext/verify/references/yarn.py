"""YaRN: Peng et al. 2023, sections 3.2 to 3.4."""

import math


def schedule(numbers, model, at):
    """NTK-by-parts with cos and sin times 0.1 · ln(s) + 1, or times the number that was given."""
    d, base, length, s = model["dim"], model["theta"], model["length"], numbers["factor"]

    def index(rotations):
        return d / 2 * math.log(length / (2 * math.pi * rotations)) / math.log(base)

    start, end = max(0, math.floor(index(numbers["beta_fast"]))), min(d - 1, math.ceil(index(numbers["beta_slow"])))
    found = []
    for i in range(d // 2):
        theta = base ** (-2 * i / d)
        gone = 0.0 if i <= start else 1.0 if i >= end else (i - start) / (end - start)
        found.append((1 - gone) * theta + gone * theta / s)
    return found, numbers.get("attention_factor") or (0.1 * math.log(s) + 1 if s > 1 else 1.0)
