"""Numbers at the edge: what a method must refuse, and what it must reach exactly."""

import math

import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import tiny_models
from ctxext.converters import convert
from ctxext.errors import CtxextError
from ctxext.recipes import MsPoE, Ntk, NtkByParts, Recipe, Yarn
from ctxext.recipes.frequencies import inverse_frequencies
from ctxext.recipes.recipe import step_from_dict
from ctxext.recipes.rotary import Rotary, model_config


@pytest.mark.parametrize("key", ["first_layer", "rescale_start"])
def test_a_count_is_a_whole_number(key):
    with pytest.raises(CtxextError, match=f"{key} must be a whole number"):
        step_from_dict({"method": "mspoe", key: 1.5}, "x")
    assert isinstance(step_from_dict({"method": "mspoe", "first_layer": 1.0}, "x"), MsPoE)


@pytest.mark.parametrize(
    ("method", "key", "value", "said"),
    [
        ("yarn", "factor", 0.99, "must be at least 1"),
        ("yarn", "attention_factor", 0.0, "must be at least 0.01"),
        ("mspoe", "first_layer", -1, "must be at least 0"),
        ("mspoe", "schedule", "x", "must be one of linear, ntk, by-parts"),
        ("yarn", "factor", True, "must be a finite number"),
        ("yarn", "factor", math.inf, "must be a finite number"),
        ("mspoe", "ratio_max", 1.1, "is below ratio_min"),
    ],
)
def test_limits_hold(method, key, value, said):
    with pytest.raises(CtxextError, match=said):
        step_from_dict({"method": method, key: value}, "x")


@pytest.mark.skipif("gemma4_text" not in CONFIG_MAPPING, reason="transformers 4.57 does not know the family")
def test_ntk_slows_the_slowest_pair_by_the_factor_where_a_part_of_the_head_rotates_at_the_heads_pace(tmp_path):
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
    found = rotary.full_attention_inv_freq.double()
    return [value for value in found.tolist() if value]


@pytest.mark.parametrize("method", [NtkByParts, Yarn])
@pytest.mark.parametrize("dim", [8, 64])
def test_the_ramp_ends_at_the_last_dimension(method, dim):
    """A base so small that the ramp would end past the head: it ends at d - 1 (docs/traps.md, trap 6)."""
    base, length, factor = 100.0, 640, 4.0
    rotary = Rotary(
        theta=base, dim=dim, span=dim, trained_length=length, context_length=length, parameters={"rope_type": "default"}
    )
    stepped = rotary.with_parameters({"rope_type": "yarn", **method(factor=factor, beta_slow=0.01).schedule(rotary)})
    low = math.floor(dim * math.log(length / (32 * 2 * math.pi)) / (2 * math.log(base)))
    kept = [1 - max(i - low, 0) / (dim - 1 - low) for i in range(dim // 2)]
    wanted = [base ** (-2 * i / dim) * (keep + (1 - keep) / factor) for i, keep in enumerate(kept)]
    assert inverse_frequencies(stepped) == pytest.approx(wanted, rel=1e-12)


def test_the_ramp_of_a_base_near_one_is_still_one():
    model = model_config({"model_type": "llama", "rope_theta": 1.5, "head_dim": 8, "num_attention_heads": 1,
                          "hidden_size": 8, "max_position_embeddings": 64})  # fmt: skip
    found = inverse_frequencies(Yarn(factor=2).edit(model).rotary)
    assert all(math.isfinite(value) and value > 0 for value in found)
