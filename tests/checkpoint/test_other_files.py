"""The small files beside config.json: what a new window changes in them, and what it must leave alone."""

import json
import shutil

import pytest

from ctxext.api import Recipe, convert, verify
from ctxext.errors import CtxextError
from ctxext.methods import Llama3, PositionInterpolation, Yarn
from small_llama import read_json, scheduled

YARN = Recipe([Yarn(factor=4)])


@pytest.mark.parametrize(("length", "then"), [(128, 512), (20, 20), (None, None)])
def test_only_a_generation_length_that_was_the_window_grows(length, then, llama, tmp_path):
    (llama / "generation_config.json").write_text(json.dumps({"max_length": length, "top_p": 0.9}))
    convert(str(llama), tmp_path / "out", YARN)
    assert read_json(tmp_path / "out" / "generation_config.json") == {"max_length": then, "top_p": 0.9}


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
    schedule = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    scheduled(llama, original_max_position_embeddings=32, rope_scaling=schedule)
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


@pytest.mark.parametrize("auto", ["AutoConfig", "AutoModelForCausalLM"])
def test_an_adapter_beside_a_full_model_does_not_lead_back_to_its_base(auto, llama, tmp_path):
    """Issue: transformers 4 loaded the base that adapter_config.json names instead of the converted checkpoint."""
    import transformers

    shutil.copytree(llama, tmp_path / "base")
    named = {
        "peft_type": "LORA",
        "base_model_name_or_path": str(tmp_path / "base"),
        "r": 2,
        "target_modules": ["q_proj"],
    }
    (llama / "adapter_config.json").write_text(json.dumps(named))
    (llama / "adapter_model.safetensors").write_bytes((llama / "model.safetensors").read_bytes())
    plan = convert(str(llama), tmp_path / "out", YARN).plan
    loaded = getattr(transformers, auto).from_pretrained(tmp_path / "out")
    assert getattr(loaded, "config", loaded).max_position_embeddings == 512
    (caution,) = (caution for caution in plan.cautions if "adapter_config.json" in caution)
    assert "adapter_model.safetensors" in caution
    assert "transformers 4" in caution


LEADING_BACK = {
    "params.json": "Mistral's format",
    "consolidated.safetensors": "Mistral's format",
    "consolidated.safetensors.index.json": "Mistral's format",
    "original/params.json": "Mistral's format",
    "original/consolidated.00.pth": "Mistral's format",
    "config.4.0.0.json": "instead of config.json",
    "training_args.bin": "training",
    "trainer_state.json": "training",
    "optimizer.pt": "training",
    "rng_state_0.pth": "training",
}
KEPT = ("model.onnx", "onnx/model.onnx_data", "openvino_model.xml", "openvino_model.bin", "model-Q4_0.gguf")
KEPT_CONFIGS = ("genai_config.json", "mlc-chat-config.json", "Modelfile", "model.mlpackage/Manifest.json")


def test_every_file_that_decides_what_is_loaded_is_left_out_or_named(llama, tmp_path):
    config = {**read_json(llama / "config.json"), "configuration_files": ["config.json", "config.4.0.0.json"]}
    (llama / "config.json").write_text(json.dumps(config))
    for name in (*LEADING_BACK, *KEPT, *KEPT_CONFIGS):
        (llama / name).parent.mkdir(exist_ok=True)
        text = json.dumps(config) if name.startswith("config.4") else "{}"
        (llama / name).write_text(text)
    (llama / "consolidated.safetensors").write_bytes((llama / "model.safetensors").read_bytes())
    plan = convert(str(llama), tmp_path / "out", YARN).plan
    for name, reason in LEADING_BACK.items():
        assert not (tmp_path / "out" / name).exists(), name
        assert any(name in caution and reason in caution for caution in plan.cautions), name
    for name in (*KEPT, *KEPT_CONFIGS):
        assert (tmp_path / "out" / name).is_file(), name
        assert any(name in caution and "position settings" in caution for caution in plan.cautions), name
    import transformers

    assert transformers.AutoConfig.from_pretrained(tmp_path / "out").max_position_embeddings == 512
    assert {finding.check for finding in verify(str(tmp_path / "out")) if finding.status == "failed"} == set()


def test_a_tokenizer_file_for_some_versions_follows_the_window(llama, tmp_path):
    (llama / "tokenizer_config.json").write_text(json.dumps({"fast_tokenizer_files": ["tokenizer.4.0.0.json"]}))
    (llama / "tokenizer.4.0.0.json").write_text('{"truncation": {"max_length": 128}}')
    convert(str(llama), tmp_path / "out", YARN)
    assert read_json(tmp_path / "out" / "tokenizer.4.0.0.json") == {"truncation": {"max_length": 512}}


@pytest.mark.parametrize("inside", [False, True])
def test_a_linked_folder_is_refused_by_name(inside, llama, tmp_path):
    """Issue: `1_Pooling` as a link was missing from the output."""
    place = (llama if inside else tmp_path) / "pooling"
    place.mkdir()
    (place / "config.json").write_text("{}")
    (llama / "1_Pooling").symlink_to(place)
    with pytest.raises(CtxextError, match=r'"1_Pooling" of .* is a link to a folder'):
        convert(str(llama), tmp_path / "out", YARN)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["1_Pooling", "tokenizer_config.json", "generation_config.json", "config.json"])
def test_inspect_follows_no_link_out_of_the_folder(name, run, llama, tmp_path):
    outside = tmp_path / "outside"
    if "." in name:
        outside.write_bytes((llama / name).read_bytes() if (llama / name).exists() else b"{}")
        (llama / name).unlink(missing_ok=True)
    else:
        outside.mkdir()
        (outside / "config.json").write_text('{"pooling_mode": "secret"}')
        modules = [{"type": "Transformer", "path": ""}, {"type": "Pooling", "path": name}]
        (llama / "modules.json").write_text(json.dumps(modules))
    (llama / name).symlink_to(outside)
    result = run("inspect", llama)
    assert result.exit_code == 1
    assert "secret" not in result.output


def test_hidden_folders_stay_behind(llama, tmp_path):
    (llama / ".aws").mkdir()
    (llama / ".aws" / "credentials").write_text("secret")
    convert(str(llama), tmp_path / "out", YARN)
    assert not (tmp_path / "out" / ".aws").exists()
