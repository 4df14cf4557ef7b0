"""MrRoPE: its lists against the reference, over sizes of models and numbers, and loaded."""

import itertools
import json
import math

import pytest
import torch

from ctxext.api import METHODS, Recipe, convert
from ctxext.checkpoint.families import FAMILIES
from ctxext.errors import CtxextError
from ctxext.methods import Yarn
from ctxext.recipes.encodings.frequencies import inverse_frequencies
from ctxext.recipes.encodings.rotary import Rotary, attention_scaling
from ctxext.recipes.model_config import model_config
from ctxext.recipes.registry import method_named
from ctxext.verify.rotation import reference_of, rotations
from ctxext.verify.run import failures, verify
from loaded_models import logits
from small_llama import read_json
from tiny_models import ENCODERS, tiny_config
from tiny_models import FAMILIES as TINY

DIVIDED = {method.name: method for method in METHODS if method.name == "mrrope"}
NUMBERS = [
    ("mrrope", {}),
    ("mrrope", {"variant": "uni"}),
    ("mrrope", {"beta_fast": 4.0, "beta_slow": 2.0}),
    ("mrrope", {"beta_fast": 1e9, "beta_slow": 0.01}),
    ("mrrope", {"beta_fast": 0.01, "beta_slow": 0.01}),
]
MODELS = [*itertools.product((8, 128), (1e4, 5e5), (128, 4096, 131072))]


def llama(d: int, base: float, length: int) -> dict:
    sizes = {"head_dim": d, "num_attention_heads": 1, "hidden_size": d}
    return {"model_type": "llama", **sizes, "rope_theta": base, "max_position_embeddings": length}


@pytest.mark.parametrize(("name", "numbers"), NUMBERS)
def test_lists_equal_the_reference(name, numbers):
    for (d, base, length), factor in itertools.product(MODELS, (1.0, 4.5, 32.0)):
        step = DIVIDED[name](factor=factor, **numbers)
        made = step.edit(model_config(llama(d, base, length))).rotary
        assert isinstance(made, Rotary)
        known = {"theta": base, "dim": d, "span": d, "length": length}
        for at in (length, 2 * length):
            wanted, scaling = reference_of(step).schedule(step.to_dict(), known, at)
            assert inverse_frequencies(made, at) == pytest.approx(wanted, rel=1e-9), (d, base, length, factor)
            assert attention_scaling(made) == pytest.approx(scaling, rel=1e-12)


PLAIN = model_config(llama(8, 1e4, 128)).rotary


@pytest.mark.parametrize("name", DIVIDED)
def test_the_ends_of_a_ramp_are_in_order(name):
    step = DIVIDED[name](factor=4, beta_fast=2, beta_slow=2)
    assert [by > 1.5 for by in step.divisors(PLAIN)] == [False, False, True, True], "a step from one to the next"
    assert len(DIVIDED[name](factor=2, beta_fast=0.01, beta_slow=0.01).divisors(PLAIN)) == 4
    with pytest.raises(CtxextError, match=rf'{name}: beta_fast "2" must not be below beta_slow "2\.5"'):
        DIVIDED[name](factor=4, beta_fast=2, beta_slow=2.5)


def test_exactly_as_many_rotations_are_neither_above_nor_below():
    """The first pair completes 128 / 2π rotations in 128 tokens."""
    turns = 128 / (2 * math.pi)
    assert DIVIDED["mrrope"](factor=4, variant="uni", beta_fast=turns).divisors(PLAIN)[0] == 4 ** (1 / 3)
    assert DIVIDED["mrrope"](factor=4, variant="uni", beta_fast=turns - 1e-9).divisors(PLAIN)[0] == 1
    slow = DIVIDED["mrrope"](factor=4, variant="uni", beta_fast=99, beta_slow=turns)
    assert slow.divisors(PLAIN) == [2, 4, 4, 4]


def test_nothing_is_sharpened_at_factor_one():
    assert DIVIDED["mrrope"](factor=1).attention_factor() == 1
    assert DIVIDED["mrrope"](factor=4).attention_factor() == pytest.approx(0.1 * math.log(4) + 1)


@pytest.mark.parametrize("name", DIVIDED)
def test_classes_that_take_no_factor_on_cosine_and_sine(name):
    message = "its configuration class supports no factor on cos and sin, which this schedule needs"
    assert DIVIDED[name].refusal({}, FAMILIES["phi3"]) == message
    assert DIVIDED[name].refusal({}, FAMILIES["llama"]) == ""
    with pytest.raises(CtxextError, match=f'"phi3": {message}'):
        DIVIDED[name](factor=2).edit(model_config({**llama(8, 1e4, 128), "model_type": "phi3"}))


# The keys that only other engines read


# 128 is the original length.
IDS = torch.randint(4, 60, (1, 300), generator=torch.Generator().manual_seed(0))


REDUNDANT = {
    "mrrope": {"short_mscale": 0.1 * math.log(4) + 1, "long_mscale": 0.1 * math.log(4) + 1},
    "longrope": {"short_mscale": 1.25, "long_mscale": 1.25},
    "ntk-by-parts": {"mscale": 0.0, "mscale_all_dim": 0.0},
}


def step_of(name: str, pairs: int):
    lists = {"long_factor": [1.0 + pair for pair in range(pairs)], "attention_factor": 1.25}
    return method_named(name)(factor=4, **(lists if name == "longrope" else {}))


@pytest.mark.parametrize("name", REDUNDANT)
def test_redundant_keys_change_nothing_in_transformers(llama_source, tmp_path, name):
    """vLLM, SGLang and mlx-lm read them (docs/traps.md, trap 27)."""
    folder = tmp_path / "out"
    convert(str(llama_source), folder, Recipe([step_of(name, 4)]), check=False)
    config, keys = read_json(folder / "config.json"), REDUNDANT[name]
    written = logits(folder, IDS)
    for dialect in ("rope_parameters", "rope_scaling"):
        assert {key: config[dialect].pop(key, None) for key in keys} == pytest.approx(keys)
        assert not {"mscale", "mscale_all_dim", "short_mscale", "long_mscale"} & set(config[dialect])
    (folder / "config.json").write_text(json.dumps(config))
    assert torch.equal(logits(folder, IDS), written)


def without(config, keys):
    """A configuration without some keys, at any depth."""
    if not isinstance(config, dict):
        return config
    return {key: without(value, keys) for key, value in config.items() if key not in keys}


@pytest.mark.thorough
@pytest.mark.parametrize("name", REDUNDANT)
def test_redundant_keys_change_no_rotation_of_any_family(name):
    """Every angle and factor that a class makes, to the last bit, inside the original length and at the last."""
    compared = []
    for model_type in (*TINY, *ENCODERS):
        try:
            model = model_config(json.loads(tiny_config(model_type).to_json_string(use_diff=False)))
            step = step_of(name, model.rotary.dim // 2)
            config = step.adapt(model).resolve(model.encoding).edit(model).config
            lengths = [model.rotary.trained_length // 2, 4 * model.rotary.trained_length]
            written = rotations(config, lengths)
        except CtxextError:  # Families that take no schedule, or not this one.
            continue
        bare = without(config, REDUNDANT[name])
        assert bare != config, model_type
        assert rotations(bare, lengths) == written, model_type
        compared.append(model_type)
    assert len(compared) >= 40, compared


@pytest.mark.parametrize("name", REDUNDANT)
@pytest.mark.thorough
def test_a_second_conversion_and_the_way_back_leave_no_redundant_key(llama_source, tmp_path, name):
    convert(str(llama_source), tmp_path / "first", Recipe([step_of(name, 4)]))
    assert not failures(verify(str(tmp_path / "first"), load=False))
    again = Recipe([Yarn(factor=2)])
    convert(str(tmp_path / "first"), tmp_path / "second", again, replace_scaling=True, check=False)
    convert(str(llama_source), tmp_path / "direct", again, check=False)
    for dialect in ("rope_parameters", "rope_scaling"):
        assert (
            read_json(tmp_path / "second" / "config.json")[dialect]
            == read_json(tmp_path / "direct" / "config.json")[dialect]
        )


@pytest.mark.parametrize("name", ["yarn", "pi", "ntk", "llama3"])
def test_other_schedules_have_none(name):
    config = method_named(name)(factor=4).edit(model_config(llama(8, 1e4, 128))).config
    assert not {"mscale", "short_mscale", "long_mscale"} & set(config["rope_parameters"])
