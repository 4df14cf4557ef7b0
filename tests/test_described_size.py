"""A config.json that describes far more than the files beside it hold is refused before anything is made of it."""

import struct
import time

import pytest

import tiny_encodings
import tiny_models
from ctxext.checkpoint.auto_class import auto_class
from ctxext.checkpoint.described_size import check_described
from ctxext.checkpoint.opening import open_checkpoint
from ctxext.errors import CtxextError
from small_llama import change_json

HUGE = [
    {"vocab_size": 9_000_000},
    {"hidden_size": 9_000_000, "head_dim": 8},
    {"intermediate_size": 10**9},
    {"num_hidden_layers": 10_000},
    {"model_type": "mixtral", "num_local_experts": 10**8},
    {"model_type": "gpt2", "max_position_embeddings": 4 * 10**6},
]


def with_config(folder, config):
    change_json(folder / "config.json", **config)
    checkpoint = open_checkpoint(str(folder))
    check_described(checkpoint, auto_class(checkpoint.config))


@pytest.mark.parametrize("changed", HUGE, ids=str)
def test_a_description_that_the_files_cannot_hold(llama, changed):
    begun = time.process_time()
    with pytest.raises(CtxextError, match=r"describes far more weights than its files hold"):
        with_config(llama, changed)
    assert time.process_time() - begun < 9


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"num_hidden_layers": 200},
        {"tie_word_embeddings": True},
        {"vocab_size": 1_000_000},
        {"quantization_config": {"quant_method": "gptq", "bits": 2}},
        {"rope_parameters": {"rope_type": "only-its-own-code-knows", "rope_theta": 1e4}},
        {"rope_scaling": {"rope_type": "only-its-own-code-knows"}},
        {"auto_map": {"AutoConfig": "x.Y", "AutoModelForCausalLM": "x.Y"}},
        {"model_type": "of-its-own", "vocab_size": 9_000_000},
        {"hidden_act": "nothing-known"},
    ],
    ids=str,
)
def test_what_might_be_is_left_to_the_loading(llama, changed):
    with_config(llama, changed)


def test_room_is_what_all_weight_files_take(llama):
    """The same description beside larger files: shards, or the older kind, whatever they are called."""
    header = b"{}".ljust(8)
    more = struct.pack("<Q", len(header)) + header
    (llama / "pytorch_model-00001-of-00002.bin").write_bytes(more)
    with pytest.raises(CtxextError, match="far more"):
        with_config(llama, {"vocab_size": 9_000_000})
    with (llama / "pytorch_model-00002-of-00002.bin").open("wb") as file:
        file.truncate(40_000_000)
    with_config(llama, {"vocab_size": 9_000_000})


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "deepseek_v3", "gpt2", "qwen3_moe", "llama4_text"])
def test_real_descriptions_pass(name, tmp_path):
    (tiny_encodings if name == "gpt2" else tiny_models).save(name, tmp_path)
    with_config(tmp_path, {})
