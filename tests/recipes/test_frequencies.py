"""Frequencies and factors at numbers that published models have, each from its formula (`by_hand.py`)."""

import math

import pytest

from by_hand import by_hand
from ctxext.api import METHODS
from ctxext.errors import CtxextError
from ctxext.recipes.encodings.frequencies import inverse_frequencies
from ctxext.recipes.encodings.rotary import Rotary, attention_scaling
from ctxext.recipes.model_config import model_config
from ctxext.recipes.recipe import step_from_dict

THETA, DIM, LENGTH = 1e4, 16, 128


def rotary(rope_type, context_length=4 * LENGTH, trained_length=LENGTH, **numbers):
    return Rotary(
        theta=THETA,
        dim=DIM,
        span=DIM,
        trained_length=trained_length,
        context_length=context_length,
        parameters={"rope_type": rope_type, **numbers},
    )


SCHEDULES = [
    ("pi", "default", {"factor": 1.0}),
    ("pi", "linear", {"factor": 3.0}),
    ("dynamic", "dynamic", {"factor": 3.0}),
    ("yarn", "yarn", {"factor": 4.0}),
    ("yarn", "yarn", {}),  # The factor of the two lengths.
    ("yarn", "yarn", {"factor": 2.0, "beta_fast": 8.0, "beta_slow": 0.25}),
    ("yarn", "yarn", {"factor": 2.0, "beta_fast": 8.0, "beta_slow": 0.25, "truncate": False}),
    ("yarn", "yarn", {"factor": 4.0, "beta_fast": 1.0, "beta_slow": 1.0, "truncate": False}),  # Kimi K2: a step.
    ("llama3", "llama3", {"factor": 8.0, "low_freq_factor": 0.5, "high_freq_factor": 6.0}),
    ("longrope", "longrope", {"short_factor": [1.0] * 8, "long_factor": [float(pair + 1) for pair in range(8)]}),
]


@pytest.mark.parametrize(("method", "rope_type", "numbers"), SCHEDULES)
def test_frequencies_are_those_of_the_formula(method, rope_type, numbers):
    schedule = rotary(rope_type, context_length=LENGTH if method == "dynamic" else 4 * LENGTH, **numbers)
    for at in (1, LENGTH, LENGTH + 64, 2 * LENGTH):
        wanted, _ = by_hand(method, **{"factor": 4.0, **numbers}, base=THETA, size=DIM, length=LENGTH, at=at)
        assert inverse_frequencies(schedule, at) == pytest.approx(wanted)
    assert inverse_frequencies(schedule) == inverse_frequencies(schedule, LENGTH)


def test_a_ramp_counts_from_the_schedule_s_own_length_and_parts_of_heads_at_the_whole_heads_pace():
    longer = rotary("yarn", factor=4.0, original_max_position_embeddings=LENGTH, trained_length=999)
    assert inverse_frequencies(longer) == inverse_frequencies(rotary("yarn", factor=4.0))
    half = Rotary(theta=THETA, dim=8, span=16, trained_length=9, context_length=9, parameters={})
    assert inverse_frequencies(half) == pytest.approx([THETA ** (-2 * pair / DIM) for pair in range(4)])


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (rotary("proportional"), "are unknown"),
        (rotary("linear"), 'lacks "factor"'),
        (rotary("longrope", short_factor=[1.0] * 7, long_factor=[1.0] * 7), "is invalid"),
        (rotary("linear", factor=0), "is invalid"),
        (rotary("llama3", factor=2, low_freq_factor=1.0, high_freq_factor=1.0), "is invalid"),
    ],
)
def test_schedules_that_make_none(schedule, message):
    with pytest.raises(CtxextError, match=message):
        inverse_frequencies(schedule)


@pytest.mark.parametrize(
    ("schedule", "wanted"),
    [
        (rotary("default"), 1),
        (rotary("linear", factor=4.0), 1),
        (rotary("linear", factor=4.0, attention_factor=1.25), 1.25),
        (rotary("yarn", factor=4.0), 0.1 * math.log(4) + 1),
        (rotary("yarn"), 0.1 * math.log(4) + 1),
        (rotary("yarn", factor=1.0), 1),
        (rotary("yarn", factor=0.5), 1),
        (rotary("yarn", factor=4.0, attention_factor=0.0), 0),
        (rotary("longrope", factor=4.0), math.sqrt(1 + math.log(4) / math.log(LENGTH))),
        (rotary("longrope"), math.sqrt(1 + math.log(4) / math.log(LENGTH))),
        (rotary("longrope", factor=4.0, mscale=1, mscale_all_dim=2), math.sqrt(1 + math.log(4) / math.log(LENGTH))),
        # DeepSeek-V2's code: the quotient of both.
        (rotary("yarn", factor=40.0, mscale=1.0, mscale_all_dim=1.0), 1),
        (
            rotary("yarn", factor=40.0, mscale=0.707, mscale_all_dim=0.5),
            (0.0707 * math.log(40) + 1) / (0.05 * math.log(40) + 1),
        ),
        (rotary("yarn", factor=40.0, mscale=0.707), 0.1 * math.log(40) + 1),
    ],
)
def test_the_factor_on_cos_and_sin(schedule, wanted):
    assert attention_scaling(schedule) == pytest.approx(wanted)


def test_lengths_of_an_encoding():
    plain, scaled = rotary("default", context_length=LENGTH), rotary("yarn", factor=4.0)
    assert (plain.is_scaled, scaled.is_scaled, rotary("default").is_scaled) == (False, True, True)
    assert (plain.usable_length, scaled.usable_length) == (LENGTH, 4 * LENGTH)
    dynamic = rotary("dynamic", context_length=LENGTH, factor=2.5)
    assert (dynamic.is_scaled, dynamic.usable_length) == (True, 320)
    assert rotary("dynamic", context_length=LENGTH).usable_length == LENGTH
    assert scaled.schedule_summary == "yarn ×4 from 128 tokens"
    assert rotary("yarn").schedule_summary == "yarn from 128 tokens"
    unknown = Rotary(**{**vars(rotary("linear", factor=2.0)), "length_origin": "max_position_embeddings"})
    assert (unknown.lacks_original, unknown.schedule_summary) == (True, "linear ×2")
    assert not Rotary(**{**vars(scaled), "length_origin": "max_position_embeddings"}).lacks_original
    declares = Rotary(**{**vars(plain), "declared_length": 4096})
    assert (declares.claimed_length, plain.claimed_length) == (4096, LENGTH)
    assert (declares.at_length(256).claimed_length, declares.usable_length) == (256, 4096)


def rows_of(**numbers):
    llama = {"model_type": "llama", "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1, "head_dim": 8}
    step = step_from_dict({"method": "adaptive", "factor": 8, **numbers}, "here")
    return step.settings(model_config({**llama, "max_position_embeddings": LENGTH, "rope_theta": THETA}))


def test_each_level_has_the_schedule_of_its_factor():
    rows = rows_of(around="pi")
    plain = [THETA ** (-2 * pair / 8) for pair in range(4)]
    assert rows["factors"] == [2, 4, 8]
    assert rows["base"] == pytest.approx(plain)
    for factor, row in zip(rows["factors"], rows["inverse_frequencies"], strict=True):
        assert row == pytest.approx([one / factor for one in plain])
    assert rows["attention_factors"] == [1, 1, 1]
    assert not {"around", "long_factor"} & rows.keys(), "what the code does not read"
    assert rows_of(around="yarn")["attention_factors"] == pytest.approx([0.1 * math.log(f) + 1 for f in (2, 4, 8)])


def test_longrope_s_divisors_rise_with_the_factor():
    """d at the full factor F, and d^(ln f / ln F) at f, so that 8 at eight times is 2 at twice the length."""
    divisors = [1.0, 2.0, 4.0, 8.0]
    rows = rows_of(around="longrope", long_factor=divisors)
    for factor, row in zip(rows["factors"], rows["inverse_frequencies"], strict=True):
        slowed = [THETA ** (-2 * pair / 8) / by ** (math.log(factor) / math.log(8)) for pair, by in enumerate(divisors)]
        assert row == pytest.approx(slowed)


def test_at_factor_one_the_only_level_is_the_full_list():
    rows = rows_of(around="longrope", long_factor=[1.0, 2.0, 4.0, 8.0], factor=1)
    assert rows["factors"] == [1]
    plain = [THETA ** (-2 * pair / 8) / by for pair, by in enumerate([1, 2, 4, 8])]
    assert rows["inverse_frequencies"] == [pytest.approx(plain)]


@pytest.mark.parametrize(("around", "divisors"), [("longrope", None), ("yarn", [1.0, 2.0, 4.0, 8.0])])
def test_longrope_alone_needs_its_list(around, divisors):
    with pytest.raises(CtxextError, match="long_factor requires longrope, and longrope requires long_factor") as caught:
        rows_of(around=around, long_factor=divisors)
    assert caught.value.hint == "--around longrope --long-factor FILE"


def test_the_search_space_ends_at_twice_the_target_factor():
    for method in METHODS:
        space = method.search_space(rotary("default", context_length=LENGTH), 4.0)
        if method.kind == "schedule" and method.name not in ("longrope",):
            assert (space["factor"].values, space["factor"].start) == ((4.0, 8.0), 4.0), method.name
        else:
            assert "factor" not in space, method.name


def test_a_base_is_searched_for_between_the_model_s_own_and_four_times_ntk_s():
    (abf,) = (method for method in METHODS if method.name == "abf")

    def space(theta, factor):
        return abf.search_space(Rotary(**{**vars(rotary("default")), "theta": theta}), factor)["theta"]

    assert space(1e4, 4.0).values == (1e4, 4 * 1e4 * 16)
    assert (space(1e4, 4.0).start, space(1e4, 3.0).start, space(1e6, 4.0).start) == (5e5, None, None)
    assert (space(5e5, 4.0).start, space(125000.0, 1.0).start) == (None, None), "a start lies inside"


@pytest.mark.parametrize(
    ("name", "length", "values", "start"),
    [("self-extend", 1024, (32, 512), 128), ("rerope", 1024, (32, 512), 256), ("bifocal", 3, (1, 2), 1)],
)
def test_windows_are_searched_for_up_to_a_half_of_the_length(name, length, values, start):
    (method,) = (method for method in METHODS if method.name == name)
    space = method.search_space(rotary("default", context_length=length, trained_length=length), 4.0)["window"]
    assert (space.values, space.start) == (values, start)


def test_a_schedule_is_not_put_on_another():
    llama = {"model_type": "llama", "hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": LENGTH}
    yarn, pi = (step_from_dict({"method": name, "factor": 2}, "here") for name in ("yarn", "pi"))
    made = yarn.edit(model_config(llama))
    with pytest.raises(CtxextError, match='pi cannot be applied on top of the schedule "yarn"'):
        pi.edit(made)


def test_separate_factor_and_length_are_in_the_summary():
    model = model_config({"model_type": "llama", "hidden_size": 32, "max_position_embeddings": LENGTH})
    apart = step_from_dict({"method": "yarn", "factor": 2, "target_length": 300}, "here").caution_for(model)
    assert apart == "the context length is 300 tokens as requested; the factor of 2 gives 256."
    for numbers in ({"factor": 2}, {"target_length": 300}):
        assert step_from_dict({"method": "yarn", **numbers}, "here").caution_for(model) == ""
    dynamic = step_from_dict({"method": "dynamic", "factor": 2, "target_length": 300}, "here")
    assert dynamic.caution_for(model).endswith(f"gives 256. {dynamic.caution}")


def test_a_schedule_under_both_of_its_names_is_one():
    llama = {"model_type": "llama", "hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": LENGTH}
    for names in ({"rope_type": "linear", "type": "linear"}, {"type": "linear"}, {"rope_type": "linear"}):
        parameters = model_config({**llama, "rope_scaling": {**names, "factor": 2.0}}).rotary.parameters
        assert parameters == {"rope_type": "linear", "factor": 2.0}
