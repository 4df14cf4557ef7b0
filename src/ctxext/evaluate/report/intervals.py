"""How sure a share of right answers is."""

import math

_NORMAL_97_5 = 1.959963984540054


def wilson_interval(correct: int, samples: int) -> tuple[float, float]:
    """The 95 % interval of a share, after Wilson (1927); it stays inside 0 and 1 and works at both ends.

    Args:
        correct: How many were right.
        samples: Of how many.
    """
    if samples == 0:
        return 0.0, 1.0
    z = _NORMAL_97_5
    share = correct / samples
    scale = 1 + z * z / samples
    middle = (share + z * z / (2 * samples)) / scale
    half = z * math.sqrt(share * (1 - share) / samples + z * z / (4 * samples * samples)) / scale
    low = 0.0 if correct == 0 else max(0.0, middle - half)
    high = 1.0 if correct == samples else min(1.0, middle + half)
    return low, high


def mean_interval(values: list[float]) -> tuple[float, float]:
    """The mean of some values and half the width of its 95 % interval, from their spread."""
    mean = math.fsum(values) / len(values)
    if len(values) < 2:
        return mean, math.inf
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return mean, _NORMAL_97_5 * math.sqrt(variance / len(values))
