"""The committed table of families, compared with the installed transformers."""

import importlib
import json
import sys
from pathlib import Path

import pytest
from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import tiny_models
from ctxext.checkpoint.families import (
    FAMILIES,
    FULL_TYPES,
    OTHERS,
    SLIDING_TYPES,
    family_of,
    full_attention_layers,
    layer_types,
    read,
    rotary_dim,
    rotated_layers,
    sliding_layers,
)
from ctxext.errors import CtxextError
from ctxext.recipes.model_config import model_config
from releases import IS_OLDER

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

ROTARY = [
    name
    for name, family in FAMILIES.items()
    if family.positions == "rotary" and not family.reason and name in CONFIG_MAPPING_NAMES
]
# These need a nested config.json: without it the class creates another text model than AutoConfig, or fails.
COMPOSED = {"got_ocr2", "mistral3", "moss_transcribe_diarize", "paligemma", "phi4_multimodal"}
PLAIN_KEYS = (
    "max_position_embeddings",
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_size",
    "num_hidden_layers",
    "head_dim",
    "sliding_window",
)

BASES_BEFORE = {"olmo3": 10000.0} if IS_OLDER else {}
"""Default bases of older releases of transformers 5, for a config.json without one."""


def loaded(config, folder):
    """Return the text model's configuration that AutoConfig computes from a config.json."""
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return AutoConfig.from_pretrained(folder).get_text_config(decoder=True)


def value_of(config, key):
    fields = config.to_dict()
    return fields[key] if fields.get(key) is not None else None if key in fields else getattr(config, key, None)


def schedule(config, types):
    whole = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    nested = next((whole[name] for name in types if isinstance(whole.get(name), dict)), None)
    return nested or ({} if any(isinstance(value, dict) for value in whole.values()) else whole)


def assert_reads_like(config, expected):
    """Every value of `read` equals that of AutoConfig."""
    family = family_of(config)
    for key in PLAIN_KEYS:
        want = value_of(expected, key)
        if want is None and key in ("head_dim", "num_key_value_heads"):
            continue
        if key == "head_dim" and (family.shared_rotary_key or "global_head_dim" in family.defaults):
            continue
        if key == "sliding_window" and getattr(expected, "use_sliding_window", True) is False:
            want = None
        assert read(config, family, key) == want, key

    full = schedule(expected, family.full_types)
    theta = full.get("rope_theta") or value_of(expected, family.theta_key) or value_of(expected, "rope_theta")
    if isinstance(theta, int | float) and theta != BASES_BEFORE.get(family.model_type):
        assert read(config, family, "rope_theta") == theta
    if family.nested_rope:
        local = schedule(expected, family.sliding_types).get("rope_theta")
        assert local in (None, BASES_BEFORE.get(family.model_type)) or read(config, family, "local_rope_theta") == local
    if family.rotary_dim_key is None:
        partial = full.get("partial_rotary_factor") or value_of(expected, family.partial_key) or 1.0
        assert read(config, family, "partial_rotary_factor") == pytest.approx(partial)

    types = getattr(expected, "layer_types", None) or getattr(expected, "layers_block_type", None)
    if types:
        full_layers = [index for index, name in enumerate(types) if name in FULL_TYPES]
        sliding = [index for index, name in enumerate(types) if name in SLIDING_TYPES]
        assert full_attention_layers(config, family) == full_layers
        assert sliding_layers(config, family) == sliding


@pytest.mark.parametrize("model_type", [name for name in ROTARY if name not in COMPOSED])
def test_defaults_are_those_of_the_class(model_type, tmp_path):
    config = {"model_type": model_type}
    assert_reads_like(config, loaded(config, tmp_path))


@pytest.mark.parametrize("model_type", [name for name in tiny_models.FAMILIES if name in ROTARY])
def test_values_are_read_like_those_of_transformers(model_type, tmp_path):
    tiny_models.tiny_config(model_type).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert_reads_like(config, loaded(config, tmp_path))


@pytest.mark.parametrize("model_type", [name for name in tiny_models.FAMILIES if name in ROTARY])
def test_rope_types_are_those_that_take_effect(model_type):
    import measure_rope_types

    effective = [rope_type for rope_type, words in measure_rope_types.measure(model_type).items() if words == "ok"]
    family = FAMILIES[model_type]
    if model_type in tiny_models.NO_ROTATED_LAYERS:
        assert not effective
    else:
        assert sorted(effective) == sorted(family.rope_types)


def test_every_causal_family_of_the_installed_version_is_in_the_table():
    known = {name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name in CONFIG_MAPPING_NAMES}
    assert known <= set(FAMILIES)
    assert set(CONFIG_MAPPING_NAMES) - set(FAMILIES) <= set(OTHERS)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "no model_type"),
        ({"model_type": "lama"}, 'Unknown model type "lama". Did you mean "llama"'),
        ({"model_type": "janus"}, "multimodal"),
        ({"model_type": "janus"}, "docs/families.md"),
        ({"model_type": "blip-2"}, '"blip-2" is not a causal language model but'),
        ({"model_type": "llama", "architectures": ["LlamaForTokenClassification"]}, "LlamaForTokenClassification"),
        ({"model_type": "ministral3", "text_config": {"hidden_size": 64}}, 'a "text_config", which transformers'),
    ],
)
def test_what_is_no_family_is_refused(config, message):
    with pytest.raises(CtxextError) as caught:
        family_of(config)
    assert message in f"{caught.value.message} {caught.value.hint}"


@pytest.mark.parametrize(
    ("config", "positions"),
    [
        ({"model_type": "gpt2"}, "learned"),
        ({"model_type": "bloom"}, "alibi"),
        ({"model_type": "xglm"}, "sinusoidal"),
        ({"model_type": "xlnet"}, "memory"),
        ({"model_type": "deberta"}, "learned"),
        ({"model_type": "deberta-v2"}, "learned"),
        ({"model_type": "deberta-v2", "position_buckets": 256}, "buckets"),
        ({"model_type": "inkling_text"}, "relative"),
        ({"model_type": "mamba"}, "none"),
        ({"model_type": "falcon"}, "rotary"),
        ({"model_type": "falcon", "alibi": True}, "alibi"),
        ({"model_type": "granitemoehybrid"}, "none"),
        ({"model_type": "granitemoehybrid", "position_embedding_type": "rope"}, "rotary"),
        ({"model_type": "zamba2", "use_mem_rope": True}, "rotary"),
        ({"model_type": "zamba2"}, "none"),
    ],
)
def test_positions_follow_the_config(config, positions):
    assert family_of(config).positions == positions


EXAONE = {"model_type": "exaone4", "num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}
QWEN = {"model_type": "qwen2", "num_hidden_layers": 3, "sliding_window": 8, "max_window_layers": 1}


@pytest.mark.parametrize(
    ("config", "rotated"),
    [
        ({"model_type": "llama", "num_hidden_layers": 2}, [0, 1]),
        ({"model_type": "gemma3_text", "num_hidden_layers": 12}, [5, 11]),
        ({"model_type": "gemma3_text", "num_hidden_layers": 4, "sliding_window_pattern": 2}, [1, 3]),
        ({"model_type": "smollm3", "num_hidden_layers": 5}, [0, 1, 2, 4]),
        ({"model_type": "llama4_text", "num_hidden_layers": 4}, []),
        ({"model_type": "exaone4", "num_hidden_layers": 4}, []),
        ({**EXAONE, "sliding_window": 8}, []),
        ({**EXAONE, "sliding_window": None}, [0, 1]),
        ({**QWEN, "use_sliding_window": True}, [0]),
        ({**QWEN, "use_sliding_window": False}, [0, 1, 2]),
    ],
)
def test_layers_that_a_longer_schedule_is_for(config, rotated):
    assert rotated_layers(config, family_of(config)) == rotated


def test_a_family_with_nothing_to_extend_is_refused_with_a_reason():
    assert "no position embedding" in family_of({"model_type": "exaone4"}).reason
    assert "no position embedding" in family_of({"model_type": "cohere2"}).reason
    with pytest.raises(CtxextError, match="no position embedding") as error:
        _ = model_config({"model_type": "cohere2"}).rotary
    assert "--method declare" in error.value.hint


def test_nested_text_models_are_read_by_their_own_family():
    config = {
        "model_type": "got_ocr2",
        "text_config": {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4},
    }
    family = family_of(config)
    assert (family.model_type, family.text_config) == ("got_ocr2", "text_config")
    assert rotary_dim(config, family) == 16
    assert len(layer_types(config, family)) == 32


@pytest.mark.parametrize(
    ("config", "thetas"),
    [
        ({"model_type": "gemma3_text"}, (1e6, 1e4)),
        ({"model_type": "gemma3_text", "rope_theta": 2e6, "rope_local_base_freq": 2e4}, (2e6, 2e4)),
        ({"model_type": "gemma3_text", "rope_parameters": {"full_attention": {"rope_theta": 3e6}}}, (3e6, 1e4)),
        ({"model_type": "modernbert-decoder", "global_rope_theta": 2e5, "local_rope_theta": 3e4}, (2e5, 3e4)),
        ({"model_type": "olmo3", "rope_theta": 7e5}, (7e5, 7e5)),
        ({"model_type": "gemma2", "rope_theta": 2e4}, (2e4, 2e4)),
        ({"model_type": "granite_swa", "num_hidden_layers": 2, "layer_rope_theta": [5e5, 1e4]}, (5e5, 1e4)),
    ],
)
def test_sliding_layers_have_a_separate_base(config, thetas):
    family = family_of(config)
    assert (read(config, family, "rope_theta"), read(config, family, "local_rope_theta")) == thetas


@pytest.mark.parametrize(
    ("config", "theta"),
    [
        ({"rope_theta": 5e5}, 5e5),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, 5e5),
        ({"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}, 5e5),
        ({"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6}}, 1e6),
        ({}, 1e4),
    ],
)
def test_theta_in_either_dialect(config, theta, tmp_path):
    config = {"model_type": "llama", **config}
    assert read(config, family_of(config), "rope_theta") == theta
    assert loaded(config, tmp_path).rope_parameters["rope_theta"] == theta


def test_making_the_table_again_keeps_what_it_does_not_read():
    """Measurements, the facts of 4.57, and families that transformers 5 removed."""
    make_families = importlib.import_module("make_families")
    measured = {"rope_types": ["default"], "rope_types_4x": []}
    kept = {
        "both": {"defaults": {"a": 1}, "defaults_4x": {"a": 2}, **measured},
        "gone": {"defaults": {"a": 1}, "reason": make_families.NO_LONGER, "rope_types_4x": ["linear"]},
    }
    newer = {"both": {"defaults": {"a": 3}}, "new": {"defaults": {"a": 4}}, "learned": {"positions": "learned"}}
    table = make_families.with_newer(kept, newer)
    assert table == {
        "both": {"defaults": {"a": 3}, "defaults_4x": {"a": 2}, **measured},
        "new": {"defaults": {"a": 4}, "rope_types_4x": []},
        "learned": {"positions": "learned"},
        "gone": kept["gone"],
    }
