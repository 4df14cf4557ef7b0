"""Qwen2.5-1M's published block is read, and converted to what any transformers runs."""

import pytest

from ctxext.api import Recipe, convert
from ctxext.errors import CtxextError
from ctxext.recipes.methods.dual_chunk import DualChunk
from ctxext.recipes.model_config import model_config
from published_models import published

QWEN = published("qwen2.5-7b-instruct-1m")["config"]


def test_the_published_parameters_are_used():
    """From config.json of Qwen/Qwen2.5-7B-Instruct-1M, which declares 1010000 tokens and was trained on 262144."""
    model = model_config(dict(QWEN))
    recipe = Recipe([DualChunk()]).resolve(model)
    assert recipe.steps[0].to_dict() == {
        "method": "dca", "factor": 1010000 / 262144, "temperature": "none", "chunk_size": 262144, "local": 8192
    }  # fmt: skip
    edited = recipe.edit(model)
    assert edited.rotary.context_length == 1010000
    assert edited.code["steps"][0]["chunk_size"] == 262144
    assert edited.code["steps"][0]["original_length"] == 262144


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ({}, {"target_length": 1010000, "chunk_size": 262144, "local": 8192}),
        ({"factor": 2}, {"factor": 2, "chunk_size": 262144, "local": 8192}),
        ({"target_length": 600000}, {"target_length": 600000, "chunk_size": 262144, "local": 8192}),
        ({"chunk_size": 1000}, {"target_length": 1010000, "chunk_size": 1000}),
        ({"local": 5, "factor": 2}, {"factor": 2, "local": 5}),
        ({"chunk_size": 9, "local": 5, "factor": 2}, {"factor": 2, "chunk_size": 9, "local": 5}),
    ],
)
def test_parameters_override_the_published_block(given, taken):
    assert DualChunk(**given).adapt(model_config(dict(QWEN))) == DualChunk(**taken)


@pytest.mark.parametrize("published", [None, "x", [1]])
def test_an_empty_block_has_no_effect(published):
    assert DualChunk().adapt(model_config({**QWEN, "dual_chunk_attention_config": published})) == DualChunk()


def test_other_models_require_a_factor_or_target_length(llama_source):
    with pytest.raises(CtxextError, match="a factor or a target length"):
        convert(str(llama_source), "never", Recipe([DualChunk()]))
