"""Numbers at the edge: what a method must refuse, and what it must reach exactly."""

import math

import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import tiny_models
from by_hand import by_hand
from ctxext.api import METHODS, Recipe, convert
from ctxext.errors import CtxextError
from ctxext.methods import MsPoE, Ntk, NtkByParts, Yarn
from ctxext.recipes.encodings.frequencies import inverse_frequencies
from ctxext.recipes.encodings.rotary import Rotary
from ctxext.recipes.methods.mspoe import num_kv_heads
from ctxext.recipes.model_config import model_config
from ctxext.recipes.param import Parameter, SearchRange, param, parameter_of, parameters_of
from ctxext.recipes.recipe import step_from_dict
from small_llama import read_json


@pytest.mark.parametrize("key", ["first_layer", "rescale_start"])
def test_a_count_is_a_whole_number(key):
    with pytest.raises(CtxextError, match=f"{key} must be a whole number"):
        step_from_dict({"method": "mspoe", key: 1.5}, "x")
    assert isinstance(step_from_dict({"method": "mspoe", "first_layer": 1.0}, "x"), MsPoE)


@pytest.mark.parametrize(
    ("method", "key", "value", "said"),
    [
        ("yarn", "factor", True, "must be a finite number"),
        ("yarn", "truncate", 1, "must be true or false"),
        ("longrope", "long_factor", [], "must be a list of numbers"),
        ("longrope", "long_factor", [1.0, "x"], "must be a finite number"),
        ("mspoe", "ranks", [[0, 1.5]], "must be a whole number"),
        ("mspoe", "ranks", [3], "must be a list of numbers"),
        ("mspoe", "ranks", "34", "must be a list of numbers"),
        ("mrrope", "factor", 1e308, "must be a finite number of at most"),
        ("yarn", "factor", -(10**400), "must be a finite number of at most"),
        ("mspoe", "ratio_max", 1.1, "is below ratio_min"),
    ],
)
def test_limits_hold(method, key, value, said):
    with pytest.raises(CtxextError, match=said):
        step_from_dict({"method": method, key: value}, "x")


SMALLEST = {
    **{"factor": 1, "target_length": 1, "theta": 1, "window": 1, "group": 1, "sinks": 1, "local": 1},
    **{"beta_fast": 0.01, "beta_slow": 0.01, "mscale": 0, "mscale_all_dim": 0},
    **{"attention_factor": 0.01, "low_freq_factor": 0.01, "high_freq_factor": 0.01, "chunk_size": 2},
    **{"ratio_min": 1, "ratio_max": 1, "first_layer": 0, "ramp_fast": 0, "ramp_slow": 0},
    **{"rescale_start": 0, "rescale_end": 1},
}
BESIDE = {  # What such a number needs beside it.
    "beta_fast": {"beta_slow": 0.01},
    "beta_slow": {"beta_fast": 0.01},
    "ratio_max": {"ratio_min": 1},
}


@pytest.mark.parametrize(
    ("method", "key"),
    [(method.name, field.name) for method in METHODS for field in parameters_of(method) if field.name in SMALLEST],
)
def test_the_smallest_accepted_value(method, key):
    needed = {"longrope": {"long_factor": [2.0]}, "abf": {"theta": 1e6}}.get(method, {})
    smallest = SMALLEST[key]
    for value in (smallest, smallest - (1e-4 if isinstance(smallest, float) else 1)):
        try:
            step = step_from_dict({"method": method, **needed, **BESIDE.get(key, {}), key: value}, "x")
            assert step.summary().startswith(method)
            refused = ""
        except CtxextError as error:
            refused = error.message
        assert (f"{key} must be at least" in refused) == (value < smallest), refused


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        ({"schedule": "ntk", "rescale": "middle", "rescale_start": 1, "rescale_end": 2}, "requires schedule linear"),
        ({"schedule": "linear", "rescale": "middle", "rescale_start": 1, "rescale_end": 2}, ""),
        ({"schedule": "linear", "rescale": "middle", "rescale_start": 2, "rescale_end": 2}, "cannot compress"),
        ({"schedule": "linear", "rescale": "middle", "rescale_end": 2}, "cannot compress"),
        ({"schedule": "linear", "rescale": "middle", "rescale_start": 2}, "cannot compress"),
        ({"ratio_min": 1.5, "ratio_max": 1.5}, ""),
    ],
)
def test_parameters_of_heads_must_be_consistent(numbers, said):
    if not said:
        step_from_dict({"method": "mspoe", **numbers}, "x")
        return
    with pytest.raises(CtxextError, match=said):
        step_from_dict({"method": "mspoe", **numbers}, "x")


FALCON = {"model_type": "falcon", "hidden_size": 64, "num_attention_heads": 8, "num_hidden_layers": 2, "alibi": False}
GEMMA4 = {"model_type": "gemma4_text", "num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 6}


@pytest.mark.parametrize(
    ("config", "heads"),
    [
        ({**FALCON, "multi_query": True}, 1),
        ({**FALCON, "multi_query": False}, 8),
        ({**FALCON, "multi_query": True, "new_decoder_architecture": True, "num_kv_heads": 2}, 8),
        ({**GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 2}, 2),
        ({**GEMMA4, "attention_k_eq_v": False, "num_global_key_value_heads": 2}, 4),
        ({**GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": None}, 4),
    ],
)
def test_heads_that_a_layer_hands_to_its_rotation(config, heads):
    """Falcon's new architecture repeats its keys for every query first; full layers of Gemma 4 may share them."""
    if config["model_type"] not in CONFIG_MAPPING:
        pytest.skip("this transformers has no such family")
    assert num_kv_heads(model_config({**config, "max_position_embeddings": 64})) == heads


@pytest.mark.parametrize(
    ("numbers", "factor"),
    [
        ({"factor": 4.0}, None),
        ({"factor": 4.0, "target_length": 1000}, math.sqrt(1 + math.log(4) / math.log(128))),
        ({"factor": 4.0, "target_length": 1000, "attention_factor": 1.5}, 1.5),
        ({"factor": 4.0, "attention_factor": 1.5}, 1.5),
        ({"factor": 1.0, "target_length": 1000}, None),
    ],
)
def test_the_longrope_factor_is_written_if_lengths_imply_another(numbers, factor, llama_source):
    """Section 3.4 of LongRoPE's release: sqrt(1 + ln s / ln L); transformers 4 works s out from the two lengths."""
    step = step_from_dict({"method": "longrope", "long_factor": [2.0] * 4, **numbers}, "x")
    written = step.edit(model_config(read_json(llama_source / "config.json"))).rotary.parameters
    assert written.get("attention_factor") == (factor and pytest.approx(factor))


def test_a_whole_head_that_rotates_is_not_written_out(llama_source):
    config = Yarn(factor=4).edit(model_config(read_json(llama_source / "config.json"))).config
    assert "partial_rotary_factor" not in {**config, **config["rope_parameters"], **config["rope_scaling"]}


@pytest.mark.skipif("gemma4_text" not in CONFIG_MAPPING, reason="this transformers has no such family")
def test_ntk_divides_the_slowest_frequency_by_the_factor_with_partial_rotation(tmp_path):
    """Section 3.1's wish itself: the last pair is interpolated, the first is kept, whatever the exponents run over."""
    source = tiny_models.save("gemma4_text", tmp_path / "source")
    convert(str(source), tmp_path / "out", Recipe([Ntk(factor=4)]))
    plain, raised = (tiny_models_rotary(folder) for folder in (source, tmp_path / "out"))
    assert raised[0] == plain[0]
    assert raised[-1] == pytest.approx(plain[-1] / 4, rel=1e-6)


def tiny_models_rotary(folder) -> list[float]:
    """The pairs that rotate in the full-attention layers of a loaded model."""
    from transformers import AutoModelForCausalLM

    rotary = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).model.rotary_emb
    frequencies = rotary.full_attention_inv_freq.double()
    return [value for value in frequencies.tolist() if value]


@pytest.mark.parametrize("method", [NtkByParts, Yarn])
@pytest.mark.parametrize("dim", [8, 64])
def test_the_ramp_ends_at_the_last_dimension(method, dim):
    """A base so small that the ramp would end past the head: it ends at d - 1 (docs/traps.md, trap 6)."""
    base, length, factor = 100.0, 640, 4.0
    rotary = Rotary(
        theta=base, dim=dim, span=dim, trained_length=length, context_length=length, parameters={"rope_type": "default"}
    )
    stepped = rotary.with_parameters({"rope_type": "yarn", **method(factor=factor, beta_slow=0.01).schedule(rotary)})
    wanted, _ = by_hand("yarn", factor, base, dim, length, at=length, beta_slow=0.01)
    assert inverse_frequencies(stepped) == pytest.approx(wanted, rel=1e-12)


def test_the_ramp_of_a_base_near_one_is_still_one():
    model = model_config({"model_type": "llama", "rope_theta": 1.5, "head_dim": 8, "num_attention_heads": 1,
                          "hidden_size": 8, "max_position_embeddings": 64})  # fmt: skip
    frequencies = inverse_frequencies(Yarn(factor=2).edit(model).rotary)
    assert all(math.isfinite(value) and value > 0 for value in frequencies)


def test_the_largest_number():
    assert step_from_dict({"method": "abf", "theta": 1e30}, "x").theta == 1e30
    for value in (1.0001e30, -1.0001e30, math.inf, math.nan):
        with pytest.raises(CtxextError, match=r"theta must be a finite number of at most 1e\+30"):
            step_from_dict({"method": "abf", "theta": value}, "x")


def test_the_help_contains_the_limits():
    said = Parameter(help="It counts.", min=1.0, max=8, choices=("a", "b")).describe()
    assert said == "It counts. (a or b, at least 1 and at most 8)"
    assert Parameter(help="It counts.", min=0).describe() == "It counts. (at least 0)"
    assert Parameter(help="It counts.").describe() == "It counts."
    assert Parameter(help="It counts.") == parameter_of(param(help="It counts.")), "the same where nothing is said"


def test_words_are_chosen_among_and_numbers_drawn():
    assert SearchRange(("only",)).is_choice
    assert not SearchRange((0.5, 2)).is_choice


@pytest.mark.parametrize("model_type", ["codegen", "blt", "deepseek_v4"])
def test_families_that_cannot_be_converted_have_a_reason(model_type):
    with pytest.raises(CtxextError, match=f'"{model_type}" cannot be converted: i'):
        model_config({"model_type": model_type, "max_position_embeddings": 64})


@pytest.mark.parametrize(
    ("method", "name"), [("mrrope", "beta_slow"), ("sinks", "sinks"), ("self-extend", "temperature")]
)
def test_nothing_is_no_value_of_what_always_has_one(method, name):
    with pytest.raises(CtxextError, match=f"{name} must have a value"):
        step_from_dict({"method": method, "factor": 4, name: None}, "here")
