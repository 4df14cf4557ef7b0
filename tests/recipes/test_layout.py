"""How a checkpoint with code is laid out in config.json, family by family, and that it is taken back whole."""

import copy

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ctxext.methods import MsPoE, Yarn
from ctxext.recipes.code import layout as code_layout
from ctxext.recipes.code.guards import SENTINEL, code_of
from ctxext.recipes.code.layout import depends_on_prompt, family_classes, without_code
from ctxext.recipes.methods.ntk_alibi import NtkAlibi
from ctxext.recipes.model_config import model_config

SIZES = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "max_position_embeddings": 64}
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "rope_theta": 5e4, **SIZES}
PHI3 = {"model_type": "phi3", "hidden_act": "gelu", "rope_theta": 5e4, **SIZES}
MODERNBERT = {"model_type": "modernbert-decoder", "hidden_activation": "silu", "global_rope_theta": 5e4, **SIZES}
MODERNBERT["num_hidden_layers"] = 4
TEXT = {"model_type": "gemma3_text", "head_dim": 8, "rope_theta": 5e4, **SIZES, "num_hidden_layers": 6}
GEMMA = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "text_config": TEXT}
HEADS = MsPoE(first_layer=0, head_order="fixed")


def edited(config, *steps):
    model = model_config(copy.deepcopy(config))
    for step in steps or (HEADS,):
        model = step.edit(model)
    return model.config


def test_the_rope_type_is_hidden_and_named_in_the_block():
    config = edited(LLAMA, Yarn(factor=2, beta_fast=24), HEADS)
    hidden = {"rope_type": SENTINEL, "rope_theta": 5e4}
    hidden["original_max_position_embeddings"] = 64
    assert config["rope_parameters"] == hidden
    assert config["rope_scaling"] == {key: hidden[key] for key in hidden if key != "rope_theta"} | {"rope_theta": 5e4}
    assert config["hidden_act"] == SENTINEL
    assert config["ctxext_code"]["hidden"] == {"hidden_act": "silu"}
    assert config["architectures"] == ["CtxextLlamaForCausalLM"]
    assert config["auto_map"] == {
        "AutoModel": "modeling_ctxext.CtxextLlamaModel",
        "AutoModelForCausalLM": "modeling_ctxext.CtxextLlamaForCausalLM",
        "AutoModelForSequenceClassification": "modeling_ctxext.CtxextLlamaForSequenceClassification",
        "AutoModelForTokenClassification": "modeling_ctxext.CtxextLlamaForTokenClassification",
        "AutoModelForQuestionAnswering": "modeling_ctxext.CtxextLlamaForQuestionAnswering",
        "AutoConfig": "configuration_ctxext.CtxextConfig",
    }
    yarn = {"rope_type": "yarn", "factor": 2.0, "beta_fast": 24.0, "beta_slow": 1.0}
    assert config["ctxext_code"]["rope"] == {**yarn, "original_max_position_embeddings": 64}
    assert [step["method"] for step in config["ctxext_code"]["steps"]] == ["mspoe"]
    assert edited(LLAMA)["ctxext_code"]["rope"] == {"rope_type": "default"}


def test_auto_classes_of_others_stay_beside_ours():
    config = edited({**LLAMA, "auto_map": {"AutoTokenizer": "theirs.Tokenizer"}})
    assert config["auto_map"].keys() >= {"AutoTokenizer", "AutoModel", "AutoModelForCausalLM"}
    assert config["auto_map"]["AutoTokenizer"] == "theirs.Tokenizer"


@pytest.mark.parametrize(("said", "hidden"), [({}, "silu"), ({"hidden_act": "gelu"}, "gelu")])
def test_an_activation_is_hidden_if_a_rope_type_cannot_be(said, hidden):
    plain = {key: value for key, value in PHI3.items() if key != "hidden_act"}
    config = edited({**plain, **said})
    assert config["hidden_act"] == SENTINEL
    assert config["rope_parameters"]["rope_type"] == "default"
    assert config["ctxext_code"]["hidden"] == {"hidden_act": hidden}
    assert config["ctxext_code"]["shown"] is True


def test_an_unsupported_schedule_of_the_source_is_preserved():
    schedule = {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    schedule["original_max_position_embeddings"] = 32
    config = edited({**PHI3, "rope_scaling": schedule})
    assert config["ctxext_code"]["rope"] == schedule
    assert config["rope_parameters"]["rope_type"] == "default"
    offered = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    assert edited({**PHI3, "rope_scaling": offered})["rope_parameters"]["rope_type"] == "longrope"


def test_by_layer_type_the_full_attention_s_alone_is_hidden():
    config = edited(MODERNBERT)
    types = {name: entry["rope_type"] for name, entry in config["rope_parameters"].items()}
    assert types == {"full_attention": SENTINEL, "sliding_attention": "default"}
    assert config["hidden_activation"] == SENTINEL
    assert config["ctxext_code"]["hidden"] == {"hidden_activation": "silu"}
    assert "rope_scaling" not in config


def test_the_settings_of_a_nested_language_model_are_in_its_part():
    config = edited(GEMMA)
    assert "ctxext_code" not in config
    assert config["text_config"]["rope_parameters"]["full_attention"]["rope_type"] == SENTINEL
    assert [step["method"] for step in code_of(config)["steps"]] == ["mspoe"]
    assert config["architectures"] == ["CtxextGemma3ForConditionalGeneration"]
    assert code_of({**config, "text_config": "x"}) == {}


@pytest.mark.skipif("qwen3_5" not in CONFIG_MAPPING, reason="this transformers has no such family")
@pytest.mark.parametrize(
    ("named", "made"),
    [
        (["Qwen3_5ForConditionalGeneration"], "CtxextQwen3_5ForConditionalGeneration"),
        (["Qwen3_5ForCausalLM"], "CtxextQwen3_5ForCausalLM"),
        (None, "CtxextQwen3_5ForCausalLM"),
    ],
)
def test_the_class_that_the_source_names_is_the_one_that_is_loaded(named, made):
    text = {"model_type": "qwen3_5_text", "head_dim": 8, **SIZES, "layer_types": ["full_attention"] * 2}
    assert edited({"model_type": "qwen3_5", "architectures": named, "text_config": text})["architectures"] == [made]


def test_a_nested_family_that_does_not_nest():
    flat = {**TEXT, "model_type": "gemma3"}
    assert [step["method"] for step in edited(flat)["ctxext_code"]["steps"]] == ["mspoe"]


def test_classes_of_a_language_model_alone_and_nested():
    alone = family_classes({"model_type": "llama"})
    assert alone.modeling == "transformers.models.llama.modeling_llama"
    assert alone.by_auto_class == {"AutoModel": "LlamaModel", "AutoModelForCausalLM": "LlamaForCausalLM"}
    whole = family_classes({"model_type": "llama4", "text_config": {"model_type": "llama4_text"}})
    assert whole.by_auto_class == {
        "AutoModel": "Llama4TextModel",
        "AutoModelForCausalLM": "Llama4ForCausalLM",
        "AutoModelForImageTextToText": "Llama4ForConditionalGeneration",
    }
    other = family_classes({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}})
    assert other.modeling == "transformers.models.gemma3.modeling_gemma3"
    assert other.by_auto_class["AutoModel"] == "Gemma3Model", "whose language model alone is another class"
    assert other.by_auto_class["AutoModelForImageTextToText"] == "Gemma3ForConditionalGeneration"
    assert "AutoModelForImageTextToText" not in family_classes({"model_type": "gemma3_text"}).by_auto_class


def test_a_class_of_another_module_is_not_named(tmp_path, monkeypatch):
    (tmp_path / "modeling.py").write_text("\nclass Gemma3ForCausalLM():\n    pass\n")
    monkeypatch.setattr(code_layout, "_origin", lambda module: str(tmp_path / "modeling.py"))
    assert family_classes({"model_type": "gemma3"}).by_auto_class.keys() == {"AutoModel", "AutoModelForCausalLM"}


def test_a_type_without_modeling_code_uses_that_of_another():
    """Swedish GPT has GPT-2's classes, and no module."""
    classes = family_classes({"model_type": "gpt-sw3"})
    assert classes.modeling == "transformers.models.gpt2.modeling_gpt2"
    assert classes.by_auto_class["AutoModelForCausalLM"] == "GPT2LMHeadModel"


@pytest.mark.parametrize(
    ("config", "place"),
    [
        ({"model_type": "bloom", "seq_length": 64, "n_head": 4, "n_layer": 2}, ("attention_dropout",)),
        ({"model_type": "mpt", "max_seq_len": 64, "n_heads": 4, "n_layers": 2}, ("attn_config", "attn_pdrop")),
    ],
)
@pytest.mark.parametrize("dropout", [None, 0.1])
def test_a_dropout_is_hidden_without_a_rope_type(config, place, dropout):
    source = {**config, "attn_config": {"alibi": True}, "auto_map": {"AutoModel": "theirs.Model"}}
    if dropout:
        target = source["attn_config"] if len(place) == 2 else source
        target[place[-1]] = dropout
    edited_config = edited(source, NtkAlibi(factor=2))
    value = edited_config
    for part in place:
        value = value[part]
    assert value == -1
    assert edited_config["attn_config"]["alibi"] is True
    assert edited_config["ctxext_code"]["hidden"] == {".".join(place): dropout or 0}
    assert edited_config["auto_map"].keys() >= {"AutoModel", "AutoModelForCausalLM"}
    assert "AutoConfig" not in edited_config["auto_map"]
    assert edited_config["auto_map"]["AutoModel"].startswith("modeling_ctxext.Ctxext"), (
        "code of the source would not fit"
    )
    back = without_code(edited_config)
    for part in place:
        back = back[part]
    assert back == (dropout or 0)
    assert "auto_map" not in without_code(edited_config)


@pytest.mark.parametrize("config", [LLAMA, PHI3, MODERNBERT, GEMMA], ids=lambda config: config["model_type"])
def test_removing_code_restores_the_configuration(config):
    before, made = copy.deepcopy(config), edited(config)
    assert config == before, "nothing changes in place"
    kept = copy.deepcopy(made)
    back = without_code(made)
    assert made == kept
    rotary = model_config(back).rotary
    assert (rotary.rope_type, rotary.theta, rotary.trained_length) == ("default", 5e4, 64)
    assert code_of(back) == {}
    part, was = back.get("text_config", back), config.get("text_config", config)
    for key, usual in (("hidden_act", None), ("hidden_activation", "gelu_pytorch_tanh")):
        assert part.get(key) in (was.get(key), usual)
    assert "rope_scaling" not in part
    assert SENTINEL not in str(back)
    named = config.get("architectures") or [f"{name.removeprefix('Ctxext')}" for name in made["architectures"]]
    assert back["architectures"] == named
    assert "auto_map" not in back


def test_code_beside_a_part_without_code_is_removed():
    block = {"rope": {"rope_type": "default"}, "steps": [{"method": "mspoe"}]}
    config = {"model_type": "gemma3", "text_config": {"hidden_size": 8}, "ctxext_code": block, "architectures": None}
    assert without_code(config) == {"model_type": "gemma3", "text_config": {"hidden_size": 8}, "architectures": []}


def test_other_keys_of_a_schedule_are_restored():
    block = {"rope": {"rope_type": "yarn", "factor": 2.0}, "steps": [{"method": "mspoe"}]}
    scaling = {"rope_type": SENTINEL, "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [2, 2]}
    own = {"AutoModelForCausalLM": "modeling_ctxext.CtxextLlamaForCausalLM", "AutoTokenizer": "theirs.Tokenizer"}
    config = {"auto_map": own, "ctxext_code": block, "rope_scaling": scaling}
    config["rope_parameters"] = {"rope_type": SENTINEL, "rope_theta": 1e4}
    before = copy.deepcopy(config)
    restored = without_code(config)
    assert restored["rope_scaling"] == {"rope_type": "yarn", "factor": 2.0, "mrope_section": [2, 2]}
    assert restored["rope_parameters"] == {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4}
    assert restored["auto_map"] == {"AutoTokenizer": "theirs.Tokenizer"}
    assert config == before


@pytest.mark.parametrize(
    ("steps", "wanted"),
    [
        ([], False),
        ([{"method": "dca"}], False),
        ([{"method": "mspoe", "per_prompt": True}], True),
        ([{"method": "mspoe", "per_prompt": True}, {"method": "dca"}], True),
    ],
)
def test_whether_a_prompt_s_cache_is_its_own(steps, wanted):
    assert depends_on_prompt({"ctxext_code": {"steps": steps}}) is wanted
    assert depends_on_prompt({"text_config": {"ctxext_code": {"steps": steps}}}) is wanted
