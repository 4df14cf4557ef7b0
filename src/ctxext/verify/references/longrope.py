"""LongRoPE: Ding et al. 2024, section 3."""

import math


def schedule(numbers, model, at):
    """θ_i / λ̂_i with the long list beyond the original context length, cos and sin times sqrt(1 + ln s / ln L)."""
    pairs, s, length = model["dim"] // 2, numbers["factor"], model["length"]
    divisors = numbers["long_factor"] if at > length else numbers.get("short_factor") or [1.0] * pairs
    frequencies = [model["theta"] ** (-2 * i / model["span"]) / divisors[i] for i in range(pairs)]
    scaling = math.sqrt(1 + math.log(s) / math.log(length)) if s > 1 else 1.0
    return frequencies, numbers.get("attention_factor") or scaling
