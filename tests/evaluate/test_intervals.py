import math

import pytest

from ctxext.evaluate.report.intervals import mean_interval, wilson_interval


@pytest.mark.parametrize(
    ("correct", "samples", "low", "high"),
    [  # Newcombe, Statistics in Medicine 17 (1998), table I, method 3.
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_equals_the_published_figures(correct, samples, low, high):
    assert wilson_interval(correct, samples) == pytest.approx((low, high), abs=5e-5)
    mirrored = wilson_interval(samples - correct, samples)
    assert mirrored == pytest.approx((1 - high, 1 - low), abs=5e-5)


def test_nothing_asked_is_nothing_known():
    assert wilson_interval(0, 0) == (0.0, 1.0)


def test_mean_interval():
    mean, half = mean_interval([1.0, 2.0, 3.0, 4.0])
    assert mean == 2.5
    assert half == pytest.approx(3.182446 * math.sqrt(5 / 3 / 4))
    assert mean_interval([1.0]) == (1.0, math.inf)


@pytest.mark.parametrize(
    ("count", "quantile"), [(2, 12.7062), (8, 2.36462), (11, 2.22814), (31, 2.04227), (121, 1.97993)]
)
def test_few_values_have_a_wider_interval(count, quantile):
    """Quantiles from the published tables of Student's t."""
    values = [float(number % 2) for number in range(count)]
    middle = sum(values) / count
    spread = math.sqrt(sum((value - middle) ** 2 for value in values) / (count - 1) / count)
    assert mean_interval(values)[1] == pytest.approx(quantile * spread, rel=2e-3)
