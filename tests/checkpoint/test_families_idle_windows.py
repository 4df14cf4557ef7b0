"""A sliding window that is no shorter than the context takes effect once the context is longer: never in silence."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

import tiny_models
from ctxext.api import Recipe, convert
from ctxext.checkpoint.families import family_of, idle_window, rotated_layers
from ctxext.checkpoint.opening import open_checkpoint
from ctxext.converters.plan import make_plan
from ctxext.methods import Ntk, Yarn
from ctxext.recipes.methods.adaptive import Adaptive
from ctxext.recipes.methods.dual_chunk import DualChunk
from ctxext.recipes.methods.self_extend import SelfExtend
from published_models import published, write_config
from small_llama import scheduled

LENGTH = 64
WORDS = "sliding window of 64 tokens has no effect up to 64 tokens, but limits its layers beyond"
BASE = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2, "rope_theta": 10000.0}
BASE |= {"max_position_embeddings": LENGTH, "sliding_window": LENGTH}
SWITCHED = {"use_sliding_window": True, "max_window_layers": 1, "layer_types": ["full_attention", "sliding_attention"]}
FAMILIES = {"mistral": {}, "mixtral": {}, "phi3": {"original_max_position_embeddings": LENGTH}, "starcoder2": {}}
FAMILIES |= {"qwen2": SWITCHED}
MAPS = [SelfExtend(factor=4), DualChunk(factor=4), Adaptive(factor=4)]


def source_of(model_type, folder, **changes):
    changes = {**FAMILIES[model_type], **changes}
    return scheduled(tiny_models.save(model_type, folder), sliding_window=LENGTH, rope_theta=1e4, **changes)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_schedule_warns(model_type, tmp_path):
    source = source_of(model_type, tmp_path / "source")
    for step in (Ntk(factor=4), *([] if model_type == "phi3" else [Yarn(factor=4)])):
        assert WORDS in " ".join(make_plan(open_checkpoint(str(source)), Recipe([step])).cautions)
    assert WORDS not in " ".join(make_plan(open_checkpoint(str(source)), Recipe([Ntk(factor=1)])).cautions)


@pytest.mark.parametrize("window", [LENGTH // 2, LENGTH, 2 * LENGTH, 8 * LENGTH])
@pytest.mark.parametrize("step", [Yarn(factor=4), SelfExtend(factor=4)], ids=lambda step: step.name)
@pytest.mark.parametrize("model_type", ["gemma3_text", "gemma2", "olmo3"])
def test_layers_that_keep_their_rotation_behind_a_wide_window(model_type, step, window, tmp_path):
    """A schedule of Gemma 2 changes its sliding layers too; in all other cases they keep theirs."""
    place = tiny_models.save(model_type, tmp_path / "source")
    config = {**json.loads((place / "config.json").read_text()), "sliding_window": window}
    config |= {"max_position_embeddings": LENGTH, "layer_types": ["full_attention", "sliding_attention"]}
    (place / "config.json").write_text(json.dumps(config))
    cautions = " ".join(make_plan(open_checkpoint(str(place)), Recipe([step])).cautions)
    keeps = model_type != "gemma2" or step.name == "self-extend"
    assert ("distances that they were not trained on" in cautions) == (keeps and window > LENGTH)
    assert ("first set the window to" in cautions) == (not keeps and LENGTH <= window < 4 * LENGTH)
    assert ("use the same schedule as the other layers" in cautions) == (not keeps)


@pytest.mark.parametrize("step", MAPS, ids=lambda step: step.name)
@pytest.mark.parametrize("model_type", ["mistral", "phi3"])
def test_a_map_raises_the_window(model_type, step, tmp_path):
    source = source_of(model_type, tmp_path / "source")
    done = convert(str(source), tmp_path / "out", Recipe([step]), check=False)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["sliding_window"], config["max_position_embeddings"]) == (4 * LENGTH, 4 * LENGTH)
    assert rotated_layers(config, family_of(config)) == config["ctxext_code"]["steps"][0]["layers"] == [0, 1]
    assert "sliding window of" not in " ".join(done.plan.cautions)


def test_a_far_token_is_seen_through_a_map(tmp_path):
    """The first token changes the last logits although it is four windows away; in plain Mistral it cannot."""
    source = source_of("mistral", tmp_path / "source", num_hidden_layers=1)
    convert(str(source), tmp_path / "out", Recipe([SelfExtend(factor=4)]), check=False)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True, dtype=torch.float32).eval()
    ids = torch.arange(250)[None] % 90 + 5
    other = ids.clone()
    other[0, 0] = 99
    with torch.no_grad():
        first, second = model(ids).logits[0, -1], model(other).logits[0, -1]
    assert (first - second).abs().max() > 1e-6  # Exactly 0 behind the window.


@pytest.mark.parametrize(
    "changes",
    [
        {"sliding_window": None},
        {"sliding_window": 4 * LENGTH},
        {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": LENGTH},
        {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": LENGTH, "max_window_layers": 2},
        {"sliding_window": LENGTH // 2},
    ],
    ids=["none", "wide", "switched off", "above all layers", "always active"],
)
def test_others_are_left_alone(changes):
    config = {**BASE, "model_type": "mistral", **changes}
    assert idle_window(config, family_of(config), 4 * LENGTH) is None


@pytest.mark.parametrize(
    ("config", "window"),
    [
        ({"layer_types": ["sliding_attention", "full_attention"], "model_type": "gemma2"}, LENGTH),
        ({"layer_types": ["sliding_attention", "full_attention"], "model_type": "qwen3"}, LENGTH),
        ({"model_type": "llama4_text", "attention_chunk_size": 2 * LENGTH, "no_rope_layers": [1, 1]}, 2 * LENGTH),
        ({"model_type": "llama4_text", "no_rope_layers": [1, 1], "max_position_embeddings": 4096}, 8192),
        ({"model_type": "modernbert", "local_attention": 2 * LENGTH}, LENGTH),
        ({"model_type": "gpt_neo", "window_size": LENGTH}, LENGTH),
        ({"model_type": "gpt_neo", "window_size": LENGTH, "attention_types": [[["global"], 2]]}, None),
    ],
)
def test_windows_by_other_names(config, window):
    config = {**{key: value for key, value in BASE.items() if key != "sliding_window"}, **config}
    if config["model_type"] in ("gemma2", "qwen3"):
        config.update(sliding_window=LENGTH, use_sliding_window=True)
    assert idle_window(config, family_of(config), 4 * 8192) == window


@pytest.mark.parametrize("factor", [2, 4])
def test_phi_3_5_beyond_its_window(factor, tmp_path):
    """Its window of 262144 tokens is twice its context: idle in the source and at ×2, and raised beyond."""
    config = {**published("phi-3-mini-128k-instruct")["config"], "sliding_window": 262144}
    source = open_checkpoint(str(write_config(config, tmp_path / "source")))
    plan = make_plan(source, Recipe([SelfExtend(factor=factor)]))
    assert plan.model.config["sliding_window"] == max(262144, factor * 131072)
    plan = make_plan(source, Recipe([Ntk(factor=factor * 32)]), replace_scaling=True)
    assert ("sliding window of 262144 tokens" in " ".join(plan.cautions)) == (factor > 2)
