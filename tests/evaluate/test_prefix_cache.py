"""Which configurations let prompts share a cache: those by which a token's keys hang on nothing behind it."""

import pytest

from ctxext.evaluate.scoring.prefix_cache import chooses_by_prompt, follows_length, is_static, is_static_for

LONG = {"short_factor": [1.0, 1.0], "long_factor": [1.0, 2.0]}
PROMPT = {"ctxext_code": {"rope": {}, "steps": [{"method": "mspoe", "per_prompt": True}]}}


def rope(**schedule):
    return {"rope_parameters": schedule, "max_position_embeddings": 100}


@pytest.mark.parametrize(
    ("config", "follows"),
    [
        ({}, False),
        (rope(rope_type="default"), False),
        (rope(rope_type="yarn", factor=4.0), False),
        (rope(rope_type="dynamic", factor=4.0), True),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, True),
        (rope(rope_type="longrope", **LONG), True),
        (rope(rope_type="longrope", short_factor=[1.0, 2.0], long_factor=[1.0, 2.0]), False),
        ({"rope_scaling": {"type": "su", **LONG}}, True),
        ({"text_config": {"rope_parameters": {"full_attention": {"rope_type": "dynamic"}}}}, True),
        ({"layers": [{"rope_type": "dynamic"}]}, True),
    ],
)
def test_schedules_that_follow_the_length(config, follows):
    assert follows_length(config) == follows
    assert is_static(config) == (not follows)


@pytest.mark.parametrize(
    ("config", "chooses"),
    [
        ({}, False),
        (PROMPT, True),
        ({"text_config": PROMPT}, True),
        ({"ctxext_code": {"rope": {}, "steps": [{"method": "mspoe", "ranks": [[0]]}]}}, False),
        ({"ctxext_mspoe": {"rope": {}, "ratios": [1.0]}}, True),
        ({"ctxext_mspoe": {"rope": {}, "ranks": [[0]]}}, False),
    ],
)
def test_heads_that_are_ordered_by_the_prompt(config, chooses):
    assert chooses_by_prompt(config) == chooses
    assert is_static(config) == (not chooses)
    assert is_static_for(config, 0, 1) == (not chooses)


@pytest.mark.parametrize(
    ("config", "common", "length", "is_shared"),
    [
        (rope(rope_type="default"), 0, 10**6, True),
        # One and the same inside the original length, whichever key says that.
        (rope(rope_type="dynamic"), 0, 100, True),
        (rope(rope_type="dynamic"), 100, 101, False),
        (rope(rope_type="dynamic", original_max_position_embeddings=50), 0, 50, True),
        (rope(rope_type="dynamic", original_max_position_embeddings=50), 0, 51, False),
        ({**rope(rope_type="dynamic"), "original_max_position_embeddings": 50}, 0, 51, False),
        # LongRoPE's long list is one and the same from there on.
        (rope(rope_type="longrope", original_max_position_embeddings=50, **LONG), 0, 50, True),
        (rope(rope_type="longrope", original_max_position_embeddings=50, **LONG), 49, 51, False),
        (rope(rope_type="longrope", original_max_position_embeddings=50, **LONG), 50, 51, True),
        ({**rope(type="longrope", **LONG), "original_max_position_embeddings": 50}, 50, 51, True),
        ({**rope(type="longrope", **LONG), "original_max_position_embeddings": 50}, 49, 51, False),
        # Where nothing says the original length, nothing is known.
        (rope(rope_type="longrope", **LONG), 100, 100, False),
        (rope(rope_type="longrope", **LONG), 0, 1, False),
    ],
)
def test_prompts_for_which_it_is_one_schedule(config, common, length, is_shared):
    assert is_static_for(config, common, length) == is_shared
