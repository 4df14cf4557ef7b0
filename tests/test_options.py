"""Numbers of the command line that nothing can be computed with are refused in one place."""

import math
from dataclasses import dataclass
from typing import ClassVar

import pytest

from ctxext.errors import CtxextError
from ctxext.finetune.options import TrainingOptions
from ctxext.options import Rule, check_options, option, options_of
from ctxext.search.options import SearchOptions
from ctxext.tasks.settings import Settings

BAD = {"seed": (-1, 2**32, 10**30, -(10**400)), "samples": (10**6 + 1, 10**30), "original_length": (10**11,)}


@pytest.mark.parametrize("options", [Settings, TrainingOptions, SearchOptions])
@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_whole_numbers(options, name, value):
    if name not in options.__dataclass_fields__:
        pytest.skip("it has none")
    more = {"target_length": 64} if options is SearchOptions else {}
    with pytest.raises(CtxextError, match=f"--{name.replace('_', '-')} must be a number from"):
        options(**{**more, name: value})


BROKEN = [math.nan, math.inf, -math.inf, 1e308]
NAMES = ["learning_rate", "alpha", "epochs", "weight_decay"]


@pytest.mark.parametrize(("name", "value"), [("steps", 2**32), *((name, value) for name in NAMES for value in BROKEN)])
def test_broken_numbers(name, value):
    with pytest.raises(CtxextError, match=f"--{name.replace('_', '-')} must be a number from"):
        TrainingOptions(**{name: value})


def test_usual_numbers_pass():
    assert Settings(seed=2**32 - 1, samples=10**6).seed == 2**32 - 1
    assert TrainingOptions(learning_rate=1e-3).learning_rate == 1e-3
    assert SearchOptions(target_length=10**10).target_length == 10**10


@dataclass(frozen=True, kw_only=True)
class Oven:
    """Options with each kind of limit."""

    heat: float = option(100.0, help="Heat.", min=0, below=300)
    time: float | None = option(None, help="Time.", above=0, max=60, hint="At most an hour.")
    share: float = option(0.0, help="Share.", min=0, below=1)
    mode: str = option("fan", help="Mode.", flags=("--oven-mode",), choices=("fan", "grill"))
    inner: int = option(1, help="Level.", min=1, internal=True)

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            lambda oven: oven.mode != "fan" and oven.heat > 250 and oven.heat,
            '{found} degrees are too hot for mode "{mode}".',
            "Remove mode {mode}.",
        ),
    )

    def __post_init__(self) -> None:
        check_options(self)


@pytest.mark.parametrize(
    ("values", "message", "hint"),
    [
        ({"heat": -1}, "--heat must be at least 0 and below 300, not -1.", ""),
        ({"heat": 300}, "--heat must be at least 0 and below 300, not 300.", ""),
        ({"time": 0.0}, "--time must be above 0 and at most 60, not 0.", "At most an hour."),
        ({"time": 61}, '--time must be a number from -60 to 60, not "61".', "At most an hour."),
        ({"share": 1.0}, "--share must be a share from 0 to 1, not 1.", ""),
        ({"inner": 0}, "--inner must be at least 1, not 0.", ""),
        ({"mode": "oil"}, 'Unknown --oven-mode "oil".', "Choose fan, grill."),
        ({"mode": "oil", "heat": 280}, '280 degrees are too hot for mode "oil".', "Remove mode oil."),
    ],
)
def test_limits_rules_and_choices(values, message, hint):
    with pytest.raises(CtxextError) as caught:
        Oven(**values)
    assert (caught.value.message, caught.value.hint or "") == (message, hint)


def test_included_limits():
    assert Oven(heat=0, time=60, share=0.999, mode="grill").inner == 1
    assert [*options_of(Oven)] == ["heat", "time", "share", "mode"]
