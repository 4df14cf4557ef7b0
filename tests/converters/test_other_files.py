"""The small files beside config.json: what a new window changes in them, and what it must leave alone."""

import json

import pytest

from ctxext.converters import convert
from ctxext.errors import CtxextError
from ctxext.recipes import Llama3, PositionInterpolation, Recipe, Yarn
from small_llama import read_json

YARN = Recipe([Yarn(factor=4)])


@pytest.mark.parametrize(("length", "then"), [(128, 512), (20, 20), (None, None)])
def test_only_a_generation_length_that_was_the_window_grows(length, then, llama, tmp_path):
    (llama / "generation_config.json").write_text(json.dumps({"max_length": length, "top_p": 0.9}))
    convert(str(llama), tmp_path / "out", YARN)
    assert read_json(tmp_path / "out" / "generation_config.json") == {"max_length": then, "top_p": 0.9}


def test_a_tokenizer_that_says_its_window_twice(llama, tmp_path):
    """The words of one file may hold the key again further in: only the tokenizer's own limit is the window."""
    content = {"model_max_length": 128, "extra": {"model_max_length": 77}}
    (llama / "tokenizer_config.json").write_text(json.dumps(content))
    convert(str(llama), tmp_path / "out", YARN)
    assert read_json(tmp_path / "out" / "tokenizer_config.json") == {**content, "model_max_length": 512}


@pytest.mark.parametrize("length", [10**30, 10**12, 0, None])
def test_a_tokenizer_without_a_limit_gets_none(length, llama, tmp_path):
    """transformers writes 10**30 for "no limit"."""
    (llama / "tokenizer_config.json").write_text(json.dumps({"model_max_length": length}))
    convert(str(llama), tmp_path / "out", YARN)
    assert read_json(tmp_path / "out" / "tokenizer_config.json") == {"model_max_length": length}


@pytest.mark.parametrize(("length", "then"), [(128, 512), (20, 20)])
def test_an_older_tokenizer_s_key_follows_the_window(length, then, llama, tmp_path):
    (llama / "tokenizer_config.json").write_text(json.dumps({"max_len": length, "max_length": 128}))
    convert(str(llama), tmp_path / "out", YARN)
    assert read_json(tmp_path / "out" / "tokenizer_config.json") == {"max_len": then, "max_length": 128}


def test_no_length_of_a_replaced_longrope_is_left(llama, tmp_path):
    config = read_json(llama / "config.json")
    config["original_max_position_embeddings"] = 32
    config["rope_scaling"] = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    config.pop("rope_parameters", None)
    (llama / "config.json").write_text(json.dumps(config))
    convert(str(llama), tmp_path / "out", Recipe([PositionInterpolation(factor=8)]), replace_scaling=True)
    made = read_json(tmp_path / "out" / "config.json")
    assert "original_max_position_embeddings" not in made
    assert made["max_position_embeddings"] == 256


@pytest.mark.parametrize("target", [128, 64])
def test_a_target_that_is_no_longer_than_the_window_is_refused(target, llama, tmp_path):
    with pytest.raises(CtxextError, match="not above the original context length 128"):
        convert(str(llama), tmp_path / "out", Recipe([Yarn(target_length=target)]))


def test_llama3_needs_room_between_its_two_frequencies(llama, tmp_path):
    with pytest.raises(CtxextError):
        convert(str(llama), tmp_path / "out", Recipe([Llama3(factor=4, low_freq_factor=4, high_freq_factor=4)]))
