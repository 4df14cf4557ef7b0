"""MrRoPE: arXiv 2601.22181, equations 13 to 26."""

import math


def schedule(numbers, model, at):
    """θ_i / s^e; e rises over the indices between the last fast and the first slow dimension."""
    pairs, s = model["dim"] // 2, numbers["factor"]
    thetas = [model["theta"] ** (-2 * i / model["span"]) for i in range(pairs)]
    low, high = -1, pairs
    for i, theta in enumerate(thetas):
        rotations = theta * model["length"] / (2 * math.pi)
        if rotations > numbers["beta_fast"]:
            low = i
        if rotations < numbers["beta_slow"] and high == pairs:
            high = i
    frequencies = []
    for i, theta in enumerate(thetas):
        if i <= low:
            e = 0.0
        elif i >= high:
            e = 1.0
        elif numbers["variant"] == "uni":
            e = (i - low) / (high - low)
        else:
            # The product of radices that rise as s^(2 j / (n (n + 1))).
            e = sum(2 * j / ((high - low) * (high - low + 1)) for j in range(1, i - low + 1))
        frequencies.append(theta / s**e)
    return frequencies, 0.1 * math.log(s) + 1 if s > 1 else 1.0
