"""Steps that follow one another: each must start from what the model was trained on, not from what came before."""

import pytest

from ctxext.checkpoint.opening import open_checkpoint
from ctxext.converters import make_plan
from ctxext.recipes import AdjustedBase, MsPoE, Ntk, Recipe, Yarn
from ctxext.recipes.encodings.rotary import model_config
from small_llama import read_json


@pytest.mark.parametrize("first", [AdjustedBase(theta=1e5, factor=4), Ntk(factor=4)], ids=["abf", "ntk"])
def test_a_step_after_a_raised_window_still_knows_the_trained_length(llama, first):
    source = open_checkpoint(str(llama))
    last = (
        Yarn(factor=4)
        if isinstance(first, AdjustedBase)
        else MsPoE(schedule="by-parts", first_layer=0, head_order="fixed")
    )
    config = make_plan(source, Recipe([first, last])).stock.config
    full = Recipe([first, last]).edit(model_config(source.config)).config
    known = full["rope_parameters"].get("original_max_position_embeddings")
    known = known or full["ctxext_code"]["steps"][0]["trained_length"]
    assert known == read_json(llama / "config.json")["max_position_embeddings"] == 128
    assert config["max_position_embeddings"] == full["max_position_embeddings"] == 512
    assert "ctxext" not in full
