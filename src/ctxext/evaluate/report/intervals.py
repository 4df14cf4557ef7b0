"""95 % intervals of shares and means."""

import math

_NORMAL_97_5 = 1.959963984540054
# Student's t at 97.5 % for 1 to 9 degrees of freedom; beyond, its expansion around the normal is right to 0.003.
_STUDENT_97_5 = (12.706205, 4.302653, 3.182446, 2.776445, 2.570582, 2.446912, 2.364624, 2.306004, 2.262157)


def wilson_interval(correct: int, samples: int) -> tuple[float, float]:
    """The 95 % interval of a share, after Wilson (1927); it stays inside 0 and 1 and works at both ends.

    Args:
        correct: How many answers are correct.
        samples: How many answers there are.
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
    """The mean of some values and half the width of its 95 % interval, after Student (1908), for few values too."""
    mean = math.fsum(values) / len(values)
    if len(values) < 2:
        return mean, math.inf
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return mean, _student(len(values) - 1) * math.sqrt(variance / len(values))


def _student(freedom: int) -> float:
    if freedom <= len(_STUDENT_97_5):
        return _STUDENT_97_5[freedom - 1]
    z = _NORMAL_97_5
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
