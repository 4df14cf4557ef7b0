"""A recipe taken back: the encoding, the length and the classes that the source had."""

import json

import pytest

from ctxext.api import Recipe, convert
from ctxext.errors import CtxextError
from ctxext.methods import AdjustedBase, DynamicNtk, MsPoE, Ntk, Yarn
from ctxext.recipes.code import layout as code_layout
from ctxext.recipes.code.guards import SENTINEL
from ctxext.recipes.code.layout import family_classes, without_code
from ctxext.recipes.methods.rerope import ReRope
from ctxext.recipes.methods.window import Window
from ctxext.recipes.model_config import model_config
from ctxext.recipes.recipe import plain_config
from small_llama import read_json

HEADS = MsPoE(first_layer=0, head_order="fixed")
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
RECIPES = {
    "yarn": [Yarn(factor=4)],
    "abf": [AdjustedBase(theta=1e6, factor=2)],
    "ntk": [Ntk(factor=4)],
    "dynamic": [DynamicNtk(factor=4)],
    "heads": [HEADS],
    "map": [ReRope(factor=2)],
    "heads on yarn": [Yarn(factor=4), HEADS],
    "map on abf": [AdjustedBase(theta=1e6, factor=2), ReRope(factor=2)],
    "three": [Yarn(factor=2), HEADS, Window(factor=2)],
}


@pytest.mark.parametrize("schedule", [None, LLAMA3], ids=["plain", "llama3"])
@pytest.mark.parametrize("name", RECIPES)
def test_a_conversion_is_undone(name, schedule, llama, tmp_path):
    source = read_json(llama / "config.json")
    if schedule:
        source |= {"rope_scaling": schedule, "rope_parameters": {**schedule, "rope_theta": 10000.0}}
        (llama / "config.json").write_text(json.dumps(source))
    before, recipe = model_config(source), Recipe(RECIPES[name])
    convert(str(llama), tmp_path / "out", recipe, check=False, replace_scaling=True, allow_shorter=True)
    made = read_json(tmp_path / "out" / "config.json")
    assert made != source
    restored = plain_config(model_config(made))
    assert "ctxext" not in restored.config
    assert "ctxext_code" not in restored.config
    assert restored.config["architectures"] == ["LlamaForCausalLM"]
    assert "auto_map" not in restored.config
    if schedule and recipe.replaces_encoding:  # What was replaced is gone: the plain encoding of its original length.
        assert (restored.rotary.rope_type, restored.rotary.context_length) == ("default", 32)
        assert restored.rotary.theta == before.rotary.theta
    else:
        assert {**restored.rotary.parameters} == {**before.rotary.parameters}
        for key in ("theta", "dim", "span", "trained_length", "context_length", "declared_length"):
            assert getattr(restored.rotary, key) == getattr(before.rotary, key), key
        for key in {"rope_parameters", "rope_theta", "max_position_embeddings", "hidden_act"} & source.keys():
            assert restored.config[key] == source[key]


def test_a_hidden_activation_comes_back_or_is_missed():
    hidden = {"model_type": "phi3", "hidden_act": SENTINEL, "architectures": ["CtxextPhi3ForCausalLM"]}
    block = {"rope": {"rope_type": "default"}, "steps": [{"method": "mspoe"}]}
    assert without_code({**hidden, "ctxext_code": {**block, "hidden": {"hidden_act": "silu"}}}) == {
        "model_type": "phi3",
        "hidden_act": "silu",
        "architectures": ["Phi3ForCausalLM"],
    }
    with pytest.raises(CtxextError, match='lacks the hidden value of "hidden_act"'):
        without_code({**hidden, "ctxext_code": block})
    shown = {**hidden, "hidden_act": "gelu"}
    assert without_code({**shown, "ctxext_code": block})["hidden_act"] == "gelu"
    assert without_code({"model_type": "llama"}) == {"model_type": "llama"}


@pytest.mark.parametrize("name", ["t5", "trocr", "of tomorrow"])
def test_a_family_without_a_causal_language_model(name):
    with pytest.raises(CtxextError, match=f'no causal language model of type "{name}"'):
        family_classes({"model_type": name})


def test_a_family_that_transformers_lacks(monkeypatch):
    monkeypatch.setattr(code_layout, "_origin", lambda module: None)
    with pytest.raises(CtxextError, match='no modeling code for "llama"'):
        family_classes({"model_type": "llama"})
