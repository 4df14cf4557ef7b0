"""CoPE: arXiv 2602.05258, section 3."""

import math


def schedule(numbers, model, at):
    """The last c frequencies fade along half a cosine; a millionth stands for nothing, as the carrier's lists need."""
    pairs, base = model["dim"] // 2, numbers.get("theta") or model["theta"]
    thetas = [base ** (-2 * i / model["span"]) for i in range(pairs)]
    count = numbers.get("num_faded")
    if count is None:
        count = round(0.75 * len([theta for theta in thetas if 2 * math.pi / theta > model["length"]]))
    first = pairs - min(count, pairs)
    for i in range(first, pairs):
        weight = 0.5 * (1 + math.cos(math.pi * (i - first) / max(pairs - first - 1, 1)))
        thetas[i] *= max(weight, 1e-6)
    return thetas, 1.0
