"""Checkpoints in llama.cpp, written by its converter, compared with transformers in float32.

`LLAMA_CPP` names a folder with its sources, for the converter; xllamacpp brings its server.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import tiny_models
from checkpoints_to_serve import RECIPES, prompts
from ctxext.api import Recipe, Settings, evaluate
from ctxext.checkpoint.opening import open_checkpoint
from ctxext.converters.convert import convert
from ctxext.converters.engine_support import attn_factor, serving_of, source_commands
from ctxext.gguf.convert import convert_gguf
from ctxext.gguf.header import FILE_TYPES
from ctxext.methods import Yarn
from ctxext.models.model import Loading
from ctxext.recipes.encodings.rotary import attention_scaling
from ctxext.recipes.model_config import model_config
from small_llama import change_json

llama_cpp = pytest.importorskip("xllamacpp", reason="llama.cpp is not installed")
ROOT = os.environ.get("LLAMA_CPP")
pytestmark = [pytest.mark.engine, pytest.mark.skipif(not ROOT, reason="LLAMA_CPP names no sources of llama.cpp")]

TOLERANCE = 1e-3
COMPARED = 100


def gguf(source, out, metadata=None, rope_freqs=None):
    """Convert a checkpoint; `metadata` has the form `KIND:NUMBER` of --override-kv."""
    more = json.dumps({"metadata": metadata or {}, "rope_freqs": rope_freqs})
    script = Path(__file__).with_name("to_gguf.py")
    words = [sys.executable, script, ROOT, source, out, more]
    return subprocess.run(list(map(str, words)), capture_output=True, text=True, check=False)


def test_file_types_are_those_of_llama_cpp():
    header = (Path(ROOT) / "include" / "llama.h").read_text()
    entries = re.findall(r"^\s*LLAMA_FTYPE_(?:ALL|MOSTLY)_(\w+)\s*=\s*(\d+)", header, re.MULTILINE)
    assert {int(number): name for name, number in entries} == FILE_TYPES


def asked(file, **flags):
    """Return the log-probabilities of llama.cpp's most likely tokens after each prompt."""
    common = llama_cpp.CommonParams()
    common.model.path, common.n_parallel, common.cpuparams.n_threads, common.warmup = str(file), 1, 1, False
    common.cache_type_k = common.cache_type_v = llama_cpp.ggml_type.GGML_TYPE_F32
    common.flash_attn_type = llama_cpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    common.n_ctx = 2048
    for name, value in flags.items():
        setattr(common, name, value)
    server = llama_cpp.Server(common)
    probabilities = []
    for ids in prompts():
        answer = server.handle_completions({"prompt": ids, "n_predict": 1, "temperature": 0.0, "n_probs": COMPARED})
        answer = answer if isinstance(answer, dict) else json.loads(answer)
        (token,) = answer["choices"][0]["logprobs"]["content"]
        probabilities.append({one["id"]: one["logprob"] for one in token["top_logprobs"]})
    return probabilities


@pytest.mark.parametrize("factor", [1, 2])
def test_eval_counts_as_transformers(tmp_path, factor):
    """The file and the checkpoint have the same results, plain and with yarn."""
    folder, file = "demo", tmp_path / "demo.gguf"
    result = gguf(open_checkpoint("demo").folder, file)
    assert result.returncode == 0, result.stderr
    if factor > 1:
        recipe = Recipe([Yarn(factor=factor)])
        folder = convert("demo", tmp_path / "out", recipe, check=False).out
        file = convert_gguf(file, tmp_path / "yarn.gguf", recipe).out
    lengths = (256, 500 * factor)
    settings = Settings(
        tasks=("needle", "kv", "documents"), lengths=lengths, depths=(0.0, 1.0), samples=3, generate=True
    )
    reports = [
        evaluate([source], settings, loading=Loading(dtype="fp32", engine=engine))
        for source, engine in ((folder, "transformers"), (file, "llama.cpp"))
    ]
    cells = [[(cell["task"], cell["correct"]) for cell in report["models"][0]["cells"]] for report in reports]
    assert cells[0] == cells[1]
    assert 0 < sum(correct for _, correct in cells[0]) < 3 * len(cells[0])


@torch.no_grad()
def differences(folder, served, weights=None):
    """Return the largest difference from transformers after each prompt, optionally with other weights."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    _, unexpected = model.load_state_dict(weights or {}, strict=False)
    assert not unexpected
    wanted = [model(torch.tensor([ids])).logits[0, -1].log_softmax(-1) for ids in prompts()]
    assert all(len(own) == COMPARED for own in served)
    return [
        max(abs(number - scores[token].item()) for token, number in own.items())
        for own, scores in zip(served, wanted, strict=True)
    ]


@pytest.mark.parametrize("name", ["pi", "ntk", "yarn", "llama3", "ntk-by-parts"])
def test_log_probabilities_are_those_of_transformers(made, note, tmp_path, name):
    factor = attn_factor(model_config(open_checkpoint(str(made(name))).config))
    metadata = {} if factor is None else {"llama.rope.scaling.attn_factor": f"float:{factor:.6g}"}
    result = gguf(made(name), tmp_path / "model.gguf", metadata)
    assert result.returncode == 0, result.stderr[-2000:]
    by_prompt = differences(made(name), asked(tmp_path / "model.gguf"))
    note("llama.cpp", name + (" with attn_factor" if metadata else ""), by_prompt)
    assert max(by_prompt) < TOLERANCE


@pytest.fixture(scope="module")
def plain_gguf(tmp_path_factory):
    """The demo checkpoint, converted by llama.cpp."""
    path = tmp_path_factory.mktemp("gguf") / "demo.gguf"
    assert gguf(open_checkpoint("demo").folder, path).returncode == 0
    return path


@pytest.mark.parametrize("name", ["pi", "ntk", "yarn", "llama3", "ntk-by-parts", "longrope"])
def test_a_converted_gguf_file_is_the_converted_checkpoint(made, note, plain_gguf, tmp_path, name):
    convert_gguf(plain_gguf, tmp_path / "model.gguf", Recipe(RECIPES[name]))
    found = differences(made(name), asked(tmp_path / "model.gguf"))
    note("llama.cpp", f"{name}, GGUF to GGUF", found)
    assert max(found) < TOLERANCE


@pytest.mark.parametrize("name", ["ntk-by-parts", "longrope", "dynamic"])
def test_what_its_converter_loses(made, note, tmp_path, name):
    result = gguf(made(name), tmp_path / "model.gguf", {"llama.context_length": "int:2048"})
    assert result.returncode == 0, result.stderr[-2000:]
    by_prompt = differences(made(name), asked(tmp_path / "model.gguf"))
    note("llama.cpp", f"{name}, as converted", by_prompt)
    assert max(by_prompt) > 0.1


def test_longrope_through_rope_freqs(made, note, tmp_path):
    model = model_config(open_checkpoint(str(made("longrope"))).config)
    metadata = {
        "llama.rope.scaling.attn_factor": f"float:{attention_scaling(model.rotary):.8g}",
        "llama.rope.scaling.type": "str:none",
    }
    gguf(made("longrope"), tmp_path / "model.gguf", metadata, model.rotary.parameters["long_factor"])
    by_prompt = differences(made("longrope"), asked(tmp_path / "model.gguf"))
    note("llama.cpp", "longrope with rope_freqs and attn_factor", by_prompt)
    assert max(by_prompt) < TOLERANCE


@pytest.mark.parametrize("name", ["mspoe fixed"])
def test_its_converter_refuses_checkpoints_with_code(made, tmp_path, name):
    assert gguf(made(name), tmp_path / "model.gguf").returncode != 0
    assert not (tmp_path / "model.gguf").exists()


@pytest.mark.parametrize("name", ["pi", "ntk", "yarn", "ntk-by-parts"])
def test_the_unconverted_checkpoint_is_served_as_the_converted_one(made, note, tmp_path, name):
    model = model_config(open_checkpoint(str(made(name))).config)
    words = shlex.split(source_commands("demo", model, serving_of(model))["llama.cpp"])[3:]
    pairs = list(zip(words[::2], words[1::2], strict=True))
    told = {flag: value for flag, value in pairs if flag != "--override-kv"}
    metadata = dict(value.split("=") for flag, value in pairs if flag == "--override-kv")
    gguf(open_checkpoint("demo").folder, tmp_path / "model.gguf", metadata)
    kinds = llama_cpp.llama_rope_scaling_type
    read = {
        "-c": lambda text: ("n_ctx", int(text)),
        "--rope-freq-base": lambda text: ("rope_freq_base", float(text)),
        "--rope-scale": lambda text: ("rope_freq_scale", 1 / float(text)),
        "--yarn-orig-ctx": lambda text: ("yarn_orig_ctx", int(text)),
        "--rope-scaling": lambda text: (
            "rope_scaling_type",
            getattr(kinds, f"LLAMA_ROPE_SCALING_TYPE_{text.upper()}"),
        ),
    }
    by_prompt = differences(
        made(name), asked(tmp_path / "model.gguf", **dict(read[k](text) for k, text in told.items()))
    )
    note("llama.cpp", f"{name}, unconverted", by_prompt)
    assert max(by_prompt) < TOLERANCE


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss"])
def test_another_family_is_served_as_converted(note, tmp_path, monkeypatch, family):
    """DeepSeek's yarn scales all scores; gpt-oss rotates its sliding layers too."""
    sizes = {
        "vocab_size": 3072,
        "max_position_embeddings": 512,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "hidden_size": 64,
    }
    monkeypatch.setattr(tiny_models, "SIZES", {**tiny_models.SIZES, **sizes})
    monkeypatch.setattr(tiny_models, "_spread", lambda name: 0.5 if "embed" in name else 0.13)
    source = tiny_models.save(family, tmp_path / "plain")
    for file in open_checkpoint("demo").folder.glob("*token*"):
        shutil.copy(file, source)
    change_json(source / "config.json", topk_method="noaux_tc", scoring_func="sigmoid")  # As published.
    assert gguf(source, tmp_path / "plain.gguf").returncode == 0
    recipe = Recipe([Yarn(factor=4)])
    convert_gguf(tmp_path / "plain.gguf", tmp_path / "yarn.gguf", recipe)
    found = differences(convert(str(source), tmp_path / "yarn", recipe, check=False).out, asked(tmp_path / "yarn.gguf"))
    note("llama.cpp", f"yarn, {family}, GGUF to GGUF", found)
    assert max(found) < TOLERANCE
