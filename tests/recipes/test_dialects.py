"""What is written for both dialects of transformers, family by family, beside the schedule itself."""

import dataclasses

import pytest

from ctxext.checkpoint.families import FAMILIES
from ctxext.methods import Yarn
from ctxext.recipes.encodings.base import provenance
from ctxext.recipes.encodings.dialects import unsupported_reason, write_length
from ctxext.recipes.encodings.rotary import nested_by_type, write_explicit
from ctxext.recipes.model_config import model_config

SIZES = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 6, "max_position_embeddings": 64}
LLAMA = {"model_type": "llama", "rope_theta": 1e4, **SIZES}
GEMMA = {"model_type": "gemma3_text", "rope_theta": 1e6, "rope_local_base_freq": 1e4, "head_dim": 8, **SIZES}


def edited(config):
    return Yarn(factor=2).edit(model_config(config)).config


def test_layer_types_have_separate_schedules():
    full, family = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6}, FAMILIES["gemma3_text"]
    sliding = {"rope_type": "default", "rope_theta": 1e4}
    assert nested_by_type(GEMMA, family, full) == {"full_attention": full, "sliding_attention": sliding}
    there = {"sliding_attention": {"rope_type": "default", "rope_theta": 7.0}, "full_attention": {"rope_theta": 9.0}}
    own = {**GEMMA, "rope_parameters": {**there, "rope_theta": 5.0}}
    nested = nested_by_type(own, family, full)
    assert nested == {"full_attention": full, "sliding_attention": there["sliding_attention"]}
    assert nested["sliding_attention"] is not there["sliding_attention"]
    without = dataclasses.replace(family, defaults={})
    bare = {key: value for key, value in GEMMA.items() if key != "rope_local_base_freq"}
    assert nested_by_type(bare, without, full) == {"full_attention": full}


LATENT = {"model_type": "deepseek_v3", "qk_rope_head_dim": 8, **SIZES}
FALCON = {"model_type": "falcon", **SIZES, "alibi": False}


@pytest.mark.parametrize(
    ("config", "said", "written"),
    [
        (LLAMA, {}, {"head_dim": 8}),
        (LLAMA, {"head_dim": 16}, {"head_dim": 16}),
        (FALCON, {}, {}),
        (LATENT, {}, {}),
        ({"model_type": "llama"}, {}, {}),
    ],
)
def test_the_head_size_is_written_if_the_class_reads_it(config, said, written):
    family = FAMILIES[config["model_type"]]
    text = dict(said)
    write_explicit(config, {}, text, family if len(config) > 1 else dataclasses.replace(family, defaults={}))
    assert text == written


@pytest.mark.parametrize("said", [{}, {"dtype": "bfloat16"}, {"torch_dtype": "bfloat16"}])
def test_the_weight_type_is_written_under_both_names(said):
    whole, text = dict(said), {"head_dim": 8, "dtype": "float32"}
    write_explicit(LLAMA, whole, text, FAMILIES["llama"])
    assert whole == (dict.fromkeys(("dtype", "torch_dtype"), "bfloat16") if said else {})
    assert text == {"head_dim": 8, "dtype": "float32", "torch_dtype": "float32"}, "a nested part has its own"
    assert edited({**LLAMA, **said}).get("torch_dtype") == ("bfloat16" if said else None)


@pytest.mark.parametrize(("above", "wanted"), [({}, {}), ({"model_max_length": 64}, {"model_max_length": 128})])
def test_a_length_is_written_to_all_keys_of_the_family(above, wanted):
    text = {"max_position_embeddings": 64, "max_seq_len": 64, **above}
    write_length(text, FAMILIES["llama"], 128)
    assert text == {"max_position_embeddings": 128, "max_seq_len": 64, **wanted}


def test_the_reason_why_a_family_does_not_support_a_schedule():
    assert unsupported_reason(FAMILIES["llama"], "yarn") == ""
    assert unsupported_reason(FAMILIES["gemma4_text"], "linear") == ""
    assert unsupported_reason(FAMILIES["codegen"], "default") == FAMILIES["codegen"].reason != ""
    said = 'its code does not support the rope type "yarn" (supported: default, proportional)'
    assert unsupported_reason(FAMILIES["gemma4_text"], "yarn") == said
    none = dataclasses.replace(FAMILIES["llama"], rope_types=())
    assert unsupported_reason(none, "yarn") == 'its code does not support the rope type "yarn" (supported: none)'
    assert unsupported_reason(none, "default") == ""


def test_a_length_is_written_into_the_part_of_the_language_model():
    text = {"max_position_embeddings": 12, "hidden_size": 8}
    nested = model_config({"model_type": "clip", "text_config": dict(text), "vision_config": {}})
    assert nested.encoding.write_length_to(nested.config, nested.family) == nested.config
    longer = nested.encoding.at_length(24).write_length_to(nested.config, nested.family)
    assert longer == {"model_type": "clip", "text_config": {**text, "max_position_embeddings": 24}, "vision_config": {}}
    flat = model_config({"model_type": "bert", **text})
    assert flat.encoding.at_length(24).write_length_to(flat.config, flat.family)["max_position_embeddings"] == 24


@pytest.mark.parametrize(("noted", "expected"), [({"trained_length": 7}, {"trained_length": 7}), ("x", {}), (None, {})])
def test_the_record_of_a_conversion_is_read(noted, expected):
    assert provenance({"ctxext": noted}) == expected
    assert provenance({}) == {}
