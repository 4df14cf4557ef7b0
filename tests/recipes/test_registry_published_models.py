"""What six methods make of models that people have, against figures written by hand from cards and papers.

Each file of tests/resources/configs holds a model's published config.json facts with their source, and beside them:
`original`, `reads`, `declares` (tokens), `rotates` (dimensions of a head), `theta`, `cache` (bytes in 16 bits that each
token takes in the full and in the sliding layers, and the window), and what each method gives: the context length
afterwards, with the factor where it follows from both lengths, or words of the refusal.
"""

import pytest

from ctxext.api import Recipe
from ctxext.checkpoint.geometry import claimed_length
from ctxext.checkpoint.opening import open_checkpoint
from ctxext.converters.inspection import inspect_checkpoint
from ctxext.converters.plan import make_plan
from ctxext.errors import CtxextError
from ctxext.methods import MsPoE, Ntk, PositionInterpolation, Yarn
from ctxext.recipes.methods.self_extend import SelfExtend
from published_models import NAMES, published, write

STEPS = {
    "pi": (PositionInterpolation(factor=4), False),
    "ntk": (Ntk(factor=4), False),
    "yarn": (Yarn(factor=4), False),
    "yarn-512k": (Yarn(target_length=524288), True),
    "mspoe": (MsPoE(head_order="fixed"), False),
    "self-extend": (SelfExtend(factor=2), False),
}
"""Six methods, and whether they come with --replace-scaling."""


def test_there_are_enough():
    assert len(NAMES) >= 30
    for name in NAMES:
        assert published(name)["source"]
        assert set(published(name)["expect"]) == set(STEPS)


@pytest.mark.parametrize("name", NAMES)
def test_the_plan_of_every_method(name, tmp_path):
    known, source = published(name), open_checkpoint(str(write(name, tmp_path / name)))
    for method, (step, replaces) in STEPS.items():
        expected = known["expect"][method]
        if isinstance(expected, str):
            with pytest.raises(CtxextError, match=expected):
                make_plan(source, Recipe([step]), replace_scaling=replaces)
        else:
            plan = make_plan(source, Recipe([step]), replace_scaling=replaces)
            length, factor = expected if isinstance(expected, list) else (expected, 4.0)
            config = plan.model.config
            assert claimed_length(config, plan.model.family) == plan.model.rotary.claimed_length == length, method
            check_schedule(plan.model.rotary, method, known, factor, replaces)


def check_schedule(rotary, method, known, factor, replaces):
    """The schedule in a plan against what is known of the model."""
    if STEPS[method][0].kind != "schedule":
        return
    if method == "ntk":
        theta = known["theta"] * 4 ** (known["rotates"] / (known["rotates"] - 2))
        assert (rotary.theta, rotary.rope_type) == (pytest.approx(theta), "default")
        return
    assert (rotary.theta, rotary.parameters["factor"]) == (known["theta"], factor), method
    if method != "pi":
        assert rotary.parameters["original_max_position_embeddings"] == known["original"], method
    for key, value in (known.get("keeps", {}) if replaces else {}).items():
        assert rotary.parameters[key] == value, method


@pytest.mark.parametrize("name", [name for name in NAMES if published(name)["cache"]])
def test_the_cache_is_what_engines_keep(name, tmp_path):
    sizes = published(name)["cache"]
    cache_bytes = inspect_checkpoint(open_checkpoint(str(write(name, tmp_path / name)))).cache_bytes
    for length in (8192, 131072):
        inside = min(length, sizes.get("window", length))
        assert cache_bytes[length] == sizes.get("full", 0) * length + sizes.get("sliding", 0) * inside
