"""Adapter configurations that allow or prevent a merge, written by hand; test_kinds tests those of peft."""

import json

import pytest

from ctxext.errors import CtxextError
from ctxext.merge.tensors import AdapterConfig

LORA = {"peft_type": "LORA", "r": 16, "lora_alpha": 8}


def read(folder, **changes) -> AdapterConfig:
    (folder / "adapter_config.json").write_text(json.dumps({**LORA, **changes}))
    return AdapterConfig(folder)


@pytest.mark.parametrize("given", [True, False, None, "gaussian", "eva", "orthogonal"])
def test_beginnings_that_leave_the_base(given, tmp_path):
    read(tmp_path, init_lora_weights=given)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "IA3"}, "it is IA3, and only LoRA can be merged"),
        ({"peft_type": None}, "it is None, and only LoRA can be merged"),
        (
            {"init_lora_weights": "pissa"},
            'its "pissa" weights change the base; save it with path_initial_model_for_weight_conversion',
        ),
    ],
)
def test_what_is_more_than_a_sum_of_matrices(changes, message, tmp_path):
    with pytest.raises(CtxextError) as caught:
        read(tmp_path, **changes)
    assert caught.value.message == f'"{tmp_path}" cannot be merged: {message}.'
    assert "merge_and_unload" in caught.value.hint


@pytest.mark.parametrize(
    "pattern",
    [
        *("(a+)+b", "(?:.*)*b", "(a|a)*b", r"(\w+\s?)*$", ".*" * 20 + "b", "a?" * 30 + "a" * 30, "(a|a)" * 30 + "b"),
        *("(?x)(a+) +b", r"(a)\1" * 2, "(?P<n>a+)(?P=n)b", "(a{1,9}){9}b", "[*]*" * 9 + "b"),
    ],
)
def test_a_pattern_that_takes_forever_is_refused(pattern, tmp_path):
    with pytest.raises(CtxextError, match="which takes too long to match"):
        read(tmp_path, alpha_pattern={pattern: 8})


@pytest.mark.parametrize(
    "pattern",
    [
        *(
            "q_proj",
            "model.layers.0.self_attn.q_proj",
            r"layers\.[0-9]+\.mlp\..*",
            "(q|k|v)_proj",
            ".*self_attn.q_proj",
        ),
        *("^layers.1$", r"layers\.\d+\.(q|k)_proj", r"a\*\*\*\*\*", "[*+?][*+?]"),
    ],
)
def test_patterns_of_adapters_are_matched(pattern, tmp_path):
    read(tmp_path, alpha_pattern={pattern: 8}).scale("model." + "a" * 100, 4)


def test_what_is_read_beside(tmp_path):
    plain = read(tmp_path, bias="none", lora_bias=False, layer_replication=None, alpha_pattern=None)
    assert (plain.is_tied, plain.is_transposed, plain.scale("q_proj", 16)) == (False, False, 8 / 16)
    assert read(tmp_path, ensure_weight_tying=True).is_tied
    assert read(tmp_path, fan_in_fan_out=True).is_transposed


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora_alpha": "8"}, '"lora_alpha" is "\'8\'", expected'),
        pytest.param({"lora_alpha": 10**350}, '"lora_alpha" is', id="1e350"),
        ({"alpha_pattern": {"q_proj": "8"}}, r'"alpha_pattern\.q_proj" is "\'8\'", expected'),
        ({"fan_in_fan_out": 1}, '"fan_in_fan_out" is "1", expected'),
    ],
)
def test_numbers_that_are_none(changes, message, tmp_path):
    with pytest.raises(CtxextError, match=f'"adapter_config.json": {message}'):
        read(tmp_path, **changes)


def test_a_folder_that_is_no_adapter(tmp_path):
    with pytest.raises(CtxextError, match=r'" is not an adapter: it has no adapter_config\.json'):
        AdapterConfig(tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    with pytest.raises(CtxextError, match='lacks "lora_alpha"'):
        AdapterConfig(tmp_path)


@pytest.mark.parametrize("pattern", ["(", "a{99999999999}", "*x"])
def test_a_pattern_that_is_no_regular_expression(pattern, tmp_path):
    with pytest.raises(CtxextError, match=r'"alpha_pattern" in .* contains ".*", which is not a regular expression'):
        read(tmp_path, alpha_pattern={"q_proj": 8, pattern: 8})
