"""MrRoPE, Resonance and CoPE: their lists against the references, over sizes of models and numbers, and loaded."""

import itertools

import pytest
from transformers import AutoModelForCausalLM

from ctxext.converters import convert
from ctxext.recipes import METHODS, Recipe
from ctxext.recipes.frequencies import inverse_frequencies
from ctxext.recipes.rotary import Rotary, attention_scaling, model_config
from ctxext.verify.reference import reference_of

DIVIDED = {method.name: method for method in METHODS if method.name in ("mrrope", "resonance", "cope")}
NUMBERS = [
    ("mrrope", {}),
    ("mrrope", {"variant": "uni"}),
    ("mrrope", {"beta_fast": 4.0, "beta_slow": 2.0}),
    ("mrrope", {"beta_fast": 1e9, "beta_slow": 0.0}),
    ("resonance", {}),
    ("resonance", {"beta_fast": 4.0, "beta_slow": 2.0}),
    ("cope", {}),
    ("cope", {"theta": 5e5}),
    ("cope", {"num_faded": 1}),
    ("cope", {"num_faded": 3}),
    ("cope", {"num_faded": 999}),
]
MODELS = [*itertools.product((8, 64, 128), (1e4, 5e5), (128, 4096, 131072))]


def llama(d: int, base: float, length: int) -> dict:
    sizes = {"head_dim": d, "num_attention_heads": 1, "hidden_size": d}
    return {"model_type": "llama", **sizes, "rope_theta": base, "max_position_embeddings": length}


@pytest.mark.parametrize(("name", "numbers"), NUMBERS)
def test_lists_equal_the_reference(name, numbers):
    for (d, base, length), factor in itertools.product(MODELS, (1.0, 2.0, 4.5, 32.0)):
        step = DIVIDED[name](factor=factor, **numbers)
        made = step.edit(model_config(llama(d, base, length))).rotary
        assert isinstance(made, Rotary)
        known = {"theta": base, "dim": d, "span": d, "length": length}
        for at in (length, 2 * length):
            wanted, scaling = reference_of(step).schedule(step.to_dict(), known, at)
            assert inverse_frequencies(made, at) == pytest.approx(wanted, rel=1e-9), (d, base, length, factor)
            assert attention_scaling(made) == pytest.approx(scaling, rel=1e-12)


@pytest.mark.parametrize("name", DIVIDED)
def test_a_loaded_model_rotates_by_them(name, llama_source, tmp_path):
    step = DIVIDED[name](factor=4)
    convert(str(llama_source), tmp_path / "out", Recipe([step]))
    rotary = AutoModelForCausalLM.from_pretrained(tmp_path / "out").model.rotary_emb
    known = {"theta": 1e4, "dim": 8, "span": 8, "length": 128}
    wanted, scaling = reference_of(step).schedule(step.to_dict(), known, 128)
    assert rotary.inv_freq.tolist() == pytest.approx(wanted, rel=1e-6)
    assert rotary.attention_scaling == pytest.approx(scaling, rel=1e-6)
