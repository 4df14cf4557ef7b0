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
    assert half == pytest.approx(1.959964 * math.sqrt(5 / 3 / 4))
    assert mean_interval([1.0]) == (1.0, math.inf)
