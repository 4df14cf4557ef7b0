"""A recipe taken back: the encoding, the length and the classes that the source had."""

import json

import pytest

from ctxext.converters import convert
from ctxext.recipes import AdjustedBase, DynamicNtk, MsPoE, Ntk, Recipe, Yarn
from ctxext.recipes.recipe import plain_config
from ctxext.recipes.relation import ReRope, Window
from ctxext.recipes.rotary import model_config
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
def test_taken_back(name, schedule, llama, tmp_path):
    source = read_json(llama / "config.json")
    if schedule:
        source |= {"rope_scaling": schedule, "rope_parameters": {**schedule, "rope_theta": 10000.0}}
        (llama / "config.json").write_text(json.dumps(source))
    before, recipe = model_config(source), Recipe(RECIPES[name])
    convert(str(llama), tmp_path / "out", recipe, check=False, replace_scaling=True, allow_shorter=True)
    made = read_json(tmp_path / "out" / "config.json")
    assert made != source
    found = plain_config(model_config(made))
    assert "ctxext" not in found.config
    assert "ctxext_code" not in found.config
    assert found.config["architectures"] == ["LlamaForCausalLM"]
    assert "auto_map" not in found.config
    if schedule and recipe.replaces_encoding:  # What was replaced is gone: the plain encoding of its original length.
        assert (found.rotary.rope_type, found.rotary.context_length) == ("default", 32)
        assert found.rotary.theta == before.rotary.theta
    else:
        assert {**found.rotary.parameters} == {**before.rotary.parameters}
        for key in ("theta", "dim", "span", "trained_length", "context_length", "declared_length"):
            assert getattr(found.rotary, key) == getattr(before.rotary, key), key
        for key in ("rope_parameters", "max_position_embeddings", "hidden_act"):
            assert found.config[key] == source[key]
