"""config.json and the weight files: descriptions of far more weights are refused before loading, missing weights by
every command in one line, and complete checkpoints are accepted in every form."""

import json
import shutil
import struct
import time
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import ctxext.demo
import multimodal_models
import tiny_models
from ctxext.api import Recipe, convert
from ctxext.checkpoint import loading
from ctxext.checkpoint.opening import open_checkpoint
from ctxext.errors import CtxextError
from ctxext.methods import Yarn
from ctxext.recipes.methods.self_extend import SelfExtend
from ctxext.served.every_token import _read_expected
from small_llama import make_llama, read_json

DEMO = Path(ctxext.demo.__file__).parent / "checkpoint"
LOST = "model.layers.1.self_attn.q_proj.weight"
QUICK = ("llama", "gemma3_text", "mixtral", "qwen2_moe", "deepseek_v3", "lfm2", "modernbert", "qwen2_vl", "gemma3")
MODELS = [
    pytest.param(models, name, id=f"{models.__name__}-{name}", marks=() if name in QUICK else pytest.mark.slow)
    for models, names in (
        (tiny_models, [*tiny_models.FAMILIES, *tiny_models.ENCODERS]),
        (multimodal_models, multimodal_models.NAMES),
    )
    for name in names
]


def without(folder: Path, *lost: str) -> Path:
    """Remove weights from the only file of a checkpoint."""
    weights = load_file(folder / "model.safetensors")
    kept = {name: weight for name, weight in weights.items() if name not in lost}
    (folder / "model.safetensors").unlink()  # It may be a link.
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    folder = tmp_path_factory.mktemp("missing") / "broken"
    shutil.copytree(DEMO, folder)
    return without(folder, LOST)


TRIED = ("--target-length", 640, "--lengths", 640, "--samples", 1, "--methods", "yarn")
COMMANDS = {
    "convert, configuration": ("convert", "SOURCE", "OUT", "--method", "yarn", "--factor", 2),
    "convert, code": ("convert", "SOURCE", "OUT", "--method", "self-extend", "--factor", 2),
    "convert, calibration": ("convert", "SOURCE", "OUT", "--method", "mspoe"),
    "calibration": ("convert", "SOURCE", "OUT", "--method", "mspoe", "--no-verify"),
    "eval": ("eval", "SOURCE", "--task", "passkey", "--lengths", 300, "--samples", 1, "--out", "OUT"),
    "finetune": ("finetune", "SOURCE", "OUT", "--data", "DATA", "--length", 128, "--steps", 1),
    "search": ("search", "SOURCE", "OUT", *TRIED, "--trials", 2, "--checked", 2),
    "compare": ("compare", "SOURCE", *TRIED, "--out", "OUT"),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_names_the_missing_weight(command, broken, run, tmp_path):
    (tmp_path / "data.txt").write_text("The quick brown fox jumps over the lazy dog. " * 200)
    places = {"SOURCE": broken, "OUT": tmp_path / "out", "DATA": tmp_path / "data.txt"}
    result = run(*(places.get(word, word) for word in COMMANDS[command]))
    assert result.exit_code == 1
    assert f'lacks "{LOST}"' in result.exception.message
    assert result.exception.hint.startswith("Download the checkpoint again")
    assert not (tmp_path / "out" / "config.json").exists()


@pytest.mark.parametrize("method", [Yarn(factor=2), SelfExtend(factor=2)])
def test_verify_names_it_once(method, run, tmp_path):
    convert("demo", tmp_path / "out", Recipe([method]), check=False)
    without(tmp_path / "out", LOST)
    result = run("verify", tmp_path / "out")
    assert result.exit_code == 1
    (line,) = [line for line in result.stdout.splitlines() if LOST in line]
    assert "loading" in line


def test_a_comparison_with_an_engine_names_it(broken):
    with pytest.raises(CtxextError, match=f'lacks "{LOST}"'):
        _read_expected(open_checkpoint(broken), [[1, 2]], foreign=False)


@pytest.mark.parametrize(("models", "name"), MODELS)
def test_whole_checkpoints_of_every_family_are_accepted_and_others_are_not(models, name, tmp_path):
    folder = tmp_path / "model"
    models.save(name, folder)
    whole = open_checkpoint(folder)
    loading.check_complete(whole)
    loading.check_described(whole)
    names = [*whole.headers]
    is_named = whole.config.get("architectures")
    lost = [next((name for name in names if part in name), None) for part in (".1.", ".experts.0.") if is_named]
    for one in filter(None, lost):
        copy = shutil.copytree(folder, tmp_path / one)
        with pytest.raises(CtxextError, match="lacks"):
            loading.check_complete(open_checkpoint(without(copy, one)))


def in_shards(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="20KB")
    assert len([*folder.glob("*.safetensors")]) > 2


def pickled(folder):
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")


def base_class(folder):
    transformers.AutoModel.from_pretrained(folder).save_pretrained(folder)


def tied_base_class(folder):
    """Files of the class without a head, with unprefixed names, and the configuration of the class with a head."""
    weights = load_file(folder / "model.safetensors")
    renamed = {name.removeprefix("model."): weight for name, weight in weights.items() if name != "lm_head.weight"}
    save_file(renamed, folder / "model.safetensors", {"format": "pt"})


def quantized(folder):
    config = {**read_json(folder / "config.json"), "quantization_config": {"quant_method": "gptq"}}
    (folder / "config.json").write_text(json.dumps(config))
    without(folder, LOST)


def without_pooler(folder):
    shutil.rmtree(folder)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = transformers.BertModel(transformers.BertConfig(**sizes, vocab_size=32), add_pooling_layer=False)
    model.save_pretrained(folder)


@pytest.mark.parametrize("form", [in_shards, pickled, base_class, tied_base_class, quantized, without_pooler])
def test_whole_checkpoints_in_every_form_are_accepted(form, tmp_path):
    folder = make_llama(tmp_path / "llama", tie_word_embeddings=form is tied_base_class)
    form(folder)
    loading.check_complete(open_checkpoint(folder))
    if form is pickled:
        weights = torch.load(folder / "pytorch_model.bin")
        del weights[LOST]
        torch.save(weights, folder / "pytorch_model.bin")
        with pytest.raises(CtxextError, match="lacks"):
            loading.check_complete(open_checkpoint(folder))


@pytest.mark.parametrize("tied", [False, True])
def test_recorded_names_need_no_class(tied, tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "check_described", None)
    loading.check_complete(open_checkpoint(make_llama(tmp_path / "llama", tie_word_embeddings=tied)))


HUGE = [
    {"vocab_size": 9_000_000},
    {"hidden_size": 9_000_000, "head_dim": 8},
    {"intermediate_size": 10**9},
    {"num_hidden_layers": 10_000},
    {"model_type": "mixtral", "num_local_experts": 10**8},
    {"model_type": "gpt2", "max_position_embeddings": 4 * 10**6},
]


def with_config(folder, config):
    (folder / "config.json").write_text(json.dumps({**read_json(folder / "config.json"), **config}))
    loading.check_described(open_checkpoint(str(folder)))


@pytest.mark.parametrize("changed", HUGE, ids=str)
@pytest.mark.thorough
def test_a_description_that_the_files_cannot_hold(llama, changed):
    begun = time.process_time()
    with pytest.raises(CtxextError, match=r"describes far more weights than its files contain"):
        with_config(llama, changed)
    assert time.process_time() - begun < 9


@pytest.mark.parametrize(
    "changed",
    [
        {},
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
    """The same description with larger files: shards, or the older format, under any name."""
    header = b"{}".ljust(8)
    more = struct.pack("<Q", len(header)) + header
    (llama / "pytorch_model-00001-of-00002.bin").write_bytes(more)
    with pytest.raises(CtxextError, match="far more"):
        with_config(llama, {"vocab_size": 9_000_000})
    with (llama / "pytorch_model-00002-of-00002.bin").open("wb") as file:
        file.truncate(40_000_000)
    with_config(llama, {"vocab_size": 9_000_000})


def test_real_descriptions_pass(tmp_path):
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=2, n_embd=8, n_head=2, vocab_size=64))
    model.save_pretrained(tmp_path)
    with_config(tmp_path, {})
