"""The search space comes from the method classes, and every draw is a valid recipe."""

import dataclasses
import math
import random

import pytest

import tiny_models
from ctxext.api import METHODS, Recipe
from ctxext.checkpoint.opening import open_checkpoint
from ctxext.errors import CtxextError
from ctxext.methods import LongRope, MsPoE, Yarn
from ctxext.recipes.encodings.frequencies import inverse_frequencies
from ctxext.recipes.encodings.rotary import Rotary
from ctxext.recipes.methods.rerope import ReRope
from ctxext.search.space import NONE, Space, build_space


class Dice:
    """A trial that draws at random instead of optuna."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def suggest_categorical(self, name, choices):
        return self.rng.choice(choices)

    def suggest_float(self, name, low, high, *, log=False):
        assert not log or low > 0
        return self.rng.choice([low, high, self.rng.uniform(low, high)])

    def suggest_int(self, name, low, high):
        return self.rng.randint(low, high)


ROTARY = [method for method in METHODS if method.encoding == "rotary" and not method.is_experimental]


@pytest.fixture
def space(source) -> Space:
    return build_space(open_checkpoint(str(source)), 1280)


def test_every_method_is_in_it(space):
    assert {method for methods in space.slots.values() for method in methods} == set(ROTARY)
    assert space.factor == 4.0


def test_experimental_methods_are_tried_if_named(source):
    named = build_space(open_checkpoint(str(source)), 1280, ["window", "sinks"])
    assert {method.name for methods in named.slots.values() for method in methods} == {"window", "sinks"}


def test_factors_count_from_the_original_length_and_windows_from_what_the_model_reads(source):
    """With a schedule in the checkpoint, the two lengths differ."""
    checkpoint = open_checkpoint(str(source))
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 320}
    config = {**checkpoint.config, "max_position_embeddings": 640, "rope_parameters": yarn}
    config.pop("rope_scaling", None)
    space = build_space(dataclasses.replace(checkpoint, config=config), 1280)
    assert (space.rotary.trained_length, space.rotary.context_length, space.factor) == (320, 640, 4.0)
    window = ReRope.search_space(space.rotary, space.factor)["window"]
    assert (window.values, window.start) == ((640 // 32, 640 // 2), 640 // 4)


def test_the_search_starts_from_the_published_numbers(space):
    starts = {method.name: space.recipe(parameters) for method, parameters in space.starts()}
    assert set(starts) == {method.name for method in ROTARY}
    assert starts["yarn"] == Recipe([Yarn(factor=4, beta_fast=32, beta_slow=1)])
    assert starts["mspoe"] == Recipe([MsPoE()])
    assert starts["abf"].steps[0].theta == 5e5
    yarn = Rotary(
        theta=1e4,
        dim=8,
        span=8,
        trained_length=320,
        context_length=1280,
        parameters={"rope_type": "yarn", "factor": 4.0},
    )
    plain = [1e4 ** (-pair / 4) for pair in range(4)]
    ramp = [stock / slowed for stock, slowed in zip(plain, inverse_frequencies(yarn), strict=True)]
    assert starts["longrope"].steps[0].long_factor == pytest.approx(ramp, rel=1e-3), "YaRN's, as in its paper"


def test_a_base_below_the_models_own_is_no_start(source):
    checkpoint = open_checkpoint(str(source))
    high = {**checkpoint.config, "rope_theta": 1e6, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    space = build_space(dataclasses.replace(checkpoint, config=high), 1280)
    assert "abf" not in [method.name for method, _ in space.starts()]


def test_what_is_drawn_is_accepted_and_can_be_drawn_again_from_its_parameters(space):
    refused, kinds = [], set()
    for seed in range(400):
        parameters = space.draw(Dice(seed))
        try:
            recipe = space.recipe(parameters)
        except CtxextError as error:
            refused.append(error.message)
            continue
        assert space.recipe(dict(parameters)) == recipe
        assert all(step.factor >= 4 for step in recipe.steps if step.kind == "schedule")
        kinds.add(tuple(step.name for step in recipe.steps))
    assert len(refused) < 40
    assert set(refused) <= {"The recipe has no steps."}, "with more slots hardly any draw leaves all of them empty"
    assert any(kind[0] == "abf" and kind[-1] == "mspoe" and len(kind) == 3 for kind in kinds), "steps compose"
    assert len(kinds) > 25


def test_longrope_factors_rise_and_stay_within_the_papers_bounds(space):
    seen = set()
    for seed in range(100):
        numbers = {name: Dice(seed + 1000 * place).suggest_float(name, *tried.values)
                   for place, (name, tried) in enumerate(LongRope.search_space(space.rotary, 4.0).items())
                   if name.startswith("rise")}  # fmt: skip
        factors = LongRope.from_search({"short": "ones", **numbers}, space.rotary, 4.0).long_factor
        assert list(factors) == sorted(factors)
        assert factors[0] >= 1
        assert factors[-1] <= 1.25 * 4 * (1 + 1e-3)
        seen.add(factors)
    assert len(seen) > 50
    assert math.isclose(max(max(factors) for factors in seen), 5.0, rel_tol=1e-3)


def test_methods_narrow_it(source):
    space = build_space(open_checkpoint(str(source)), 1280, ("yarn", "mspoe"))
    assert {slot: [method.name for method in methods] for slot, methods in space.slots.items()} == {
        "schedule": ["yarn"],
        "heads": ["mspoe"],
    }
    assert space.starts()[0][1]["heads"] == NONE


def test_an_inapplicable_method_is_reported(tmp_path):
    source = open_checkpoint(str(tiny_models.save("phi3", tmp_path / "phi3")))
    with pytest.raises(CtxextError, match=r"yarn does not apply.*longrope"):
        build_space(source, 1280, ("yarn",))
    assert "yarn" not in [method.name for method, _ in build_space(source, 1280).starts()]
    llama = open_checkpoint(str(tiny_models.save("llama", tmp_path / "llama")))
    assert "distance-aware" not in {
        method.name for methods in build_space(llama, 512).slots.values() for method in methods
    }
    with pytest.raises(CtxextError, match="has no effect without training"):
        build_space(llama, 512, ["distance-aware"])


def test_foreign_code_leaves_no_room_for_a_methods_own(source):
    checkpoint = open_checkpoint(str(source))
    config = {**checkpoint.config, "auto_map": {"AutoModelForCausalLM": "own.Own"}}
    assert "heads" not in build_space(dataclasses.replace(checkpoint, config=config), 1280).slots
