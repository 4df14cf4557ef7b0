"""LongRoPE: what its search draws, where it starts, and what the schedule must be."""

import math

import numpy as np
import pytest

from ctxext.errors import CtxextError
from ctxext.methods import LongRope
from ctxext.recipes.encodings.frequencies import inverse_frequencies
from ctxext.recipes.encodings.rotary import Rotary
from ctxext.recipes.methods.longrope import _interpolate

FACTOR = 4.0


def rotary(dim, length=512, **parameters):
    parameters = {"rope_type": "default", **parameters}
    return Rotary(theta=1e4, dim=dim, span=dim, trained_length=length, context_length=length, parameters=parameters)


def test_a_line_through_knots():
    assert [_interpolate([0.0, 4.0, 6.0], place) for place in (0, 0.25, 0.5, 0.75, 1)] == [0, 2, 4, 5, 6]
    assert [_interpolate([1.0, 2.0], place) for place in (0, 0.5, 1)] == [1, 1.5, 2]


@pytest.mark.parametrize(("dim", "knots"), [(4, 2), (8, 4), (16, 8), (18, 8), (128, 8)])
def test_a_search_starts_from_yarn_s_curve(dim, knots):
    """How far it rises up to each knot, 1 being an even share of the way to the factor, and 3 the most."""
    space = LongRope.search_space(rotary(dim), FACTOR)
    rises = [space[f"rise_{knot}"] for knot in range(knots)]
    assert f"rise_{knots}" not in space
    assert {one.values for one in rises} == {(0.0, 3.0)}
    plain, slowed = (inverse_frequencies(rotary(dim, rope_type=name, factor=FACTOR)) for name in ("default", "yarn"))
    curve = np.log(np.array(plain) / slowed) / math.log(FACTOR)
    heights = np.interp(np.arange(knots) / (knots - 1) * (dim // 2 - 1), range(dim // 2), curve)
    wanted = np.clip(knots * np.diff(heights, prepend=0.0), 0, 3)
    assert [one.start for one in rises] == pytest.approx(wanted)
    assert all(0 <= one.start <= 3 for one in rises)


def test_no_start_is_above_the_most_that_a_search_tries():
    """So short a model has all of the rise between two knots, of which 3 of 4 shares remain."""
    space = LongRope.search_space(rotary(8, length=6), FACTOR)
    assert [space[f"rise_{knot}"].start for knot in range(4)] == [0, 3, 0, 0]


def test_what_else_is_searched_for():
    space = LongRope.search_space(rotary(8), FACTOR)
    assert (space["short"].values, space["short"].start) == (("ones", "long"), "ones")
    assert space["attention_factor"].values == (1.0, 1.6)
    assert [name for name, tried in space.items() if tried.optional] == ["attention_factor"]
    assert set(space) == {"short", "attention_factor", *(f"rise_{knot}" for knot in range(4))}
    assert not LongRope.is_published, "lists are found for each model, so that a search starts from a guess"


@pytest.mark.parametrize(
    ("dim", "rises", "factors"),
    [
        (8, [1, 1, 1, 1], [4**0.25, 4**0.5, 4**0.75, 4]),
        (8, [0, 0, 2, 0], [1, 1, 2, 2]),
        (8, [2, 2, 0.5, 0], [2, 4, 4**1.125, 4**1.125]),
        (8, [3, 3, 0, 0], [4**0.75, 5, 5, 5]),  # 1.25 times the factor at the most.
        (4, [1, 1], [2, 4]),
        (32, [1] * 8, 4 ** ((1 + np.arange(16) * 7 / 15) / 8)),  # Straight from knot to knot.
    ],
)
def test_factors_from_rises(dim, rises, factors):
    numbers = {f"rise_{knot}": rise for knot, rise in enumerate(rises)}
    step = LongRope.from_search({**numbers, "short": "ones"}, rotary(dim), FACTOR)
    assert step.long_factor == pytest.approx(factors, rel=1e-3)
    assert (step.factor, step.short_factor, step.attention_factor) == (FACTOR, None, None)
    both = LongRope.from_search({**numbers, "short": "long", "attention_factor": 1.25}, rotary(dim), FACTOR)
    assert (both.short_factor, both.attention_factor) == (step.long_factor, 1.25)


def test_the_schedule():
    schedule = LongRope(factor=4, long_factor=(1.0, 0.5)).schedule(rotary(4))
    assert schedule == {
        "factor": 4.0,
        "original_max_position_embeddings": 512,
        "short_factor": [1.0, 1.0],
        "long_factor": [1.0, 0.5],
    }
    given = LongRope(factor=4, long_factor=(1.0, 2.0), short_factor=(0.5, 1.5), attention_factor=0.01)
    assert given.schedule(rotary(4))["short_factor"] == [0.5, 1.5]
    assert given.schedule(rotary(4))["attention_factor"] == 0.01


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        ({"long_factor": (1.0,)}, "long_factor has 1 numbers, but this model rotates 2 pairs"),
        ({"long_factor": (1.0,) * 3}, "long_factor has 3 numbers, but this model rotates 2 pairs"),
        ({"long_factor": (1.0, 1.0), "short_factor": (1.0,)}, "short_factor has 1 numbers"),
        ({"long_factor": (1.0, 0.0)}, 'long_factor must be above zero, not "0"'),
        ({"long_factor": (1.0, 1.0), "short_factor": (2.0, -1.0)}, 'short_factor must be above zero, not "-1"'),
    ],
)
def test_lists_of_another_model(lists, message):
    with pytest.raises(CtxextError, match=message):
        LongRope(factor=2, **lists).schedule(rotary(4))
