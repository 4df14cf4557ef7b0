"""The language model inside a multimodal model, for every model type in config.json."""

import json

import pytest
from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from ctxext.api import Recipe
from ctxext.checkpoint.families import FAMILIES, INNER, family_of, read
from ctxext.checkpoint.geometry import check_sizes
from ctxext.errors import CtxextError
from ctxext.methods import Yarn
from ctxext.recipes.model_config import model_config
from ctxext.recipes.recipe import plain_config

COMPOSED = [name for name, family in FAMILIES.items() if family.text_config and name in CONFIG_MAPPING_NAMES]
SIZES = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "max_position_embeddings": 4096,
    "rope_theta": 12345.0,
}
WITHOUT = "absent"
# Its vision part must fit its language model, so parts cannot be reduced separately.
NOT_BUILT = {"dots3_note"}


def config_of(whole, inner, **changes):
    text = {**SIZES, "model_type": inner, **changes}
    if inner is WITHOUT:
        del text["model_type"]
    return {"model_type": whole, "text_config": text}


def computed(config, folder):
    """Return the language model's configuration in transformers; None if it fails."""
    (folder / "config.json").write_text(json.dumps(config))
    try:
        return AutoConfig.from_pretrained(folder).get_text_config(decoder=True)
    except Exception:  # After any exception, no model of such a configuration exists.
        return None


def family_or_refusal(config):
    try:
        return family_of(config), ""
    except CtxextError as error:
        return None, error.message


def theta_of(built):
    schedule = getattr(built, "rope_parameters", None) or {}
    schedule = schedule.get("full_attention", schedule)
    return schedule.get("rope_theta") or getattr(built, "rope_theta", None)


@pytest.mark.parametrize(
    "inner", [WITHOUT, None, "brandnew_lm", "kimi_k2", "llama", "qwen2", "qwen3", "mamba", "bert", 7, ""], ids=str
)
@pytest.mark.parametrize("whole", [name for name in COMPOSED if name not in NOT_BUILT])
def test_right_or_refused_by_name(whole, inner, tmp_path):
    """It is refused, or it is the family of the class in transformers."""
    config = config_of(whole, inner)
    family, message = family_or_refusal(config)
    if family is None:
        assert f'"{whole}"' in message
        assert str(inner).replace("None", "null") in message
        assert inner is not WITHOUT
        return
    if (built := computed(config, tmp_path)) is None or family.reason:
        return
    same = FAMILIES.get(type(built).model_type) or INNER.get(type(built).model_type)
    if same is not None:
        assert (family.positions, family.layers, family.shared_rotary_key) == (
            same.positions,
            same.layers,
            same.shared_rotary_key,
        )
    if family.positions == "rotary":
        assert read(config, family, "rope_theta") == theta_of(built)
        assert read(config, family, "num_hidden_layers") == built.num_hidden_layers


@pytest.mark.parametrize("whole", [name for name in COMPOSED if name not in NOT_BUILT])
def test_the_type_that_it_has_by_default_may_be_named(whole, tmp_path):
    inner = FAMILIES[whole].text_type
    named, unnamed = family_of(config_of(whole, inner)), family_of(config_of(whole, WITHOUT))
    assert named == unnamed
    built = computed(config_of(whole, inner), tmp_path)
    assert built is None or built.model_type == inner


@pytest.mark.parametrize("whole", COMPOSED)
def test_without_a_language_model(whole):
    """Its class reads nothing from the top level, or only the keys that ctxext reads."""
    flat = {**SIZES, "model_type": whole}
    for config in (flat, {**flat, "text_config": None}):
        if FAMILIES[whole].flat_text or FAMILIES[whole].reason:
            check_sizes(config, "config.json")
        else:
            with pytest.raises(CtxextError, match='has no "text_config", which'):
                check_sizes(config, "config.json")


@pytest.mark.parametrize("key", ["llm_config", "language_config", "thinker_config", "text_config"])
@pytest.mark.parametrize("whole", ["llama", "internvl", "llava", "qwen2", "gemma3"])
def test_a_part_that_the_class_does_not_read(key, whole):
    if FAMILIES[whole].text_config == key:
        pytest.skip("it reads it")
    with pytest.raises(CtxextError, match=f'config.json has a "{key}", which'):
        family_of({**SIZES, "model_type": whole, key: {**SIZES, "model_type": "qwen2"}})


def test_every_other_type_is_refused():
    """Unsupported image-text, audio and omni models, with any language model."""
    for whole in sorted(set(CONFIG_MAPPING_NAMES) - set(FAMILIES)):
        for text in ("llama", "brandnew_lm", WITHOUT):
            with pytest.raises(CtxextError) as caught:
                family_of(config_of(whole, text))
            assert f'"{whole}"' in caught.value.message


MISTRAL4 = {
    **SIZES,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 64,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 128.0,
        "original_max_position_embeddings": 8192,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
}
MISTRAL4.pop("rope_theta")


@pytest.mark.parametrize("schedule", [True, False])
def test_mistral_4_is_read_by_its_own_rules(schedule):
    config = config_of("mistral3", "mistral4", **MISTRAL4)
    del config["text_config"]["rope_theta"]
    if not schedule:
        del config["text_config"]["rope_parameters"]
    model = model_config(config)
    assert (model.rotary.dim, model.rotary.span, model.rotary.theta) == (64, 64, 10000.0)
    assert (model.rotary.rope_type, model.rotary.parameters["factor"], model.rotary.trained_length) == (
        "yarn",
        128,
        8192,
    )
    assert set(model.family.layers) == set()
    longer = Recipe([Yarn(factor=256)]).edit(plain_config(model)).config["text_config"]["rope_parameters"]
    assert (longer["factor"], longer["llama_4_scaling_beta"], longer["rope_theta"]) == (256, 0.1, 10000.0)
    with pytest.raises(CtxextError, match='"mistral4" is not a causal language model'):
        family_of({"model_type": "mistral4"})


def test_mistral_4_without_the_key_that_its_class_needs():
    config = config_of("mistral3", "mistral4", **MISTRAL4)
    config["text_config"]["rope_parameters"] = {"rope_type": "linear", "factor": 1.0, "rope_theta": 10000.0}
    model = model_config(config)
    with pytest.raises(CtxextError, match='lacks "llama_4_scaling_beta"'):
        Recipe([Yarn(factor=4)]).edit(model)
