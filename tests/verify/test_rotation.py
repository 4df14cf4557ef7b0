"""Before anything is written, the installed transformers is asked whether it rotates as the recipe says."""

import json

import pytest
import transformers
from transformers.models.llama import modeling_llama

import tiny_models
from ctxext.api import Recipe, convert
from ctxext.errors import CtxextError
from ctxext.methods import LongRope, MsPoE, PositionInterpolation, Yarn
from ctxext.recipes.methods.mrrope import MrRope
from ctxext.recipes.model_config import model_config
from ctxext.verify.rotation import check_rotation, rotations

BY_FOUR = Recipe([PositionInterpolation(factor=4)])
LARGE = {
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rope_theta": 5e5,
}


def ignoring(monkeypatch):
    """Make Llama's rotary embedding pass over every schedule, as Nemotron's does in transformers 4.57."""
    original = modeling_llama.LlamaRotaryEmbedding.__init__

    def init(self, config, *args, **kwargs):
        config = type(config).from_dict({**config.to_dict(), "rope_scaling": None, "rope_parameters": None})
        original(self, config, *args, **kwargs)

    monkeypatch.setattr(modeling_llama.LlamaRotaryEmbedding, "__init__", init)


def test_what_would_have_no_effect_is_refused_and_nothing_is_written(llama, tmp_path, monkeypatch):
    ignoring(monkeypatch)
    with pytest.raises(
        CtxextError, match=rf'{transformers.__version__} does not support this for "llama": pi ×4'
    ) as caught:
        convert(str(llama), tmp_path / "out", BY_FOUR)
    assert "would have no effect" in caught.value.message
    assert "--no-verify" in caught.value.hint
    assert not (tmp_path / "out").exists()
    convert(str(llama), tmp_path / "out", BY_FOUR, check=False)
    assert (tmp_path / "out" / "config.json").exists()


def test_a_schedule_below_code_is_checked_too(llama, tmp_path, monkeypatch):
    ignoring(monkeypatch)
    with pytest.raises(CtxextError, match="yarn ×4 would have no effect"):
        convert(str(llama), tmp_path / "out", Recipe([Yarn(factor=4), MsPoE(head_order="fixed", first_layer=0)]))


def test_a_factor_that_the_class_drops_is_refused(tmp_path):
    source = tiny_models.save("phi3", tmp_path / "source")
    lists = {"factor": 4, "long_factor": tuple(1.0 + i for i in range(8))}
    convert(str(source), tmp_path / "usual", Recipe([LongRope(**lists)]))
    with pytest.raises(CtxextError, match="would differ from longrope"):
        convert(str(source), tmp_path / "own", Recipe([LongRope(**lists, attention_factor=1.5)]))
    config = json.loads((source / "config.json").read_text())
    assert "supports no factor on cos and sin" in MrRope.refusal(config, model_config(config).family)


@pytest.mark.thorough
def test_a_model_of_70_billion_parameters_takes_no_memory():
    plain = model_config(LARGE)
    recipe = Recipe([Yarn(factor=4)]).resolve(plain)
    assert check_rotation(recipe, LARGE, plain, recipe.edit(plain)) < 1e-6
    ((entry,),) = rotations(LARGE, [4096]).values()
    assert len(entry.frequencies) == 64
