"""Numbers of the command line that nothing can be computed with are refused in one place."""

import math

import pytest

from ctxext.errors import CtxextError
from ctxext.evaluate.settings import Settings
from ctxext.finetune.options import TrainingOptions
from ctxext.search.options import SearchOptions

BAD = {"seed": (-1, 2**32, 10**30, -(10**400)), "samples": (10**6 + 1, 10**30), "original_length": (10**11,)}


@pytest.mark.parametrize("options", [Settings, TrainingOptions, SearchOptions])
@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_whole_numbers(options, name, value):
    if name not in options.__dataclass_fields__:
        pytest.skip("it has none")
    more = {"target_length": 64} if options is SearchOptions else {}
    with pytest.raises(CtxextError, match=f"{name} must be a number from"):
        options(**{**more, name: value})


BROKEN = [math.nan, math.inf, -math.inf, 1e308]
NAMES = ["learning_rate", "alpha", "epochs", "weight_decay"]


@pytest.mark.parametrize(("name", "value"), [("steps", 2**32), *((name, value) for name in NAMES for value in BROKEN)])
def test_broken_numbers(name, value):
    with pytest.raises(CtxextError, match=f"{name} must be a number from"):
        TrainingOptions(**{name: value})


def test_usual_numbers_pass():
    assert Settings(seed=2**32 - 1, samples=10**6).seed == 2**32 - 1
    assert TrainingOptions(learning_rate=1e-3).learning_rate == 1e-3
    assert SearchOptions(target_length=10**10).target_length == 10**10
