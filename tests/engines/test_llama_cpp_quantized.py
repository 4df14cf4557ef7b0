"""Converted GGUF files of Q4_K, Q6_K and Q8_0 in llama.cpp, compared with transformers with the same weights.

llama.cpp rounds activations too where weights are quantized, so it differs from transformers by itself: a converted
file must differ no more than its source does, and from its source with the schedule as arguments not at all.
"""

import ctypes
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from checkpoints_to_serve import RECIPES
from ctxext.api import Recipe
from ctxext.checkpoint.opening import open_checkpoint
from ctxext.converters.convert import convert
from ctxext.gguf.convert import convert_gguf
from ctxext.gguf.header import read_header
from ctxext.gguf.verify import verify_gguf
from test_llama_cpp import ROOT, asked, differences, gguf, llama_cpp

pytestmark = [pytest.mark.engine, pytest.mark.skipif(not ROOT, reason="LLAMA_CPP names no sources of llama.cpp")]

# K-quants need rows of multiples of 256 weights. llama.cpp limits prompts to the length in the file.
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2}
Q8_0, Q4_K, Q6_K = 8, 12, 14
NAMES = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output"}
NAMES |= {"gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down"}


def kind_of(name):
    """Return the type of a matrix in Q4_K_M of llama-quantize, and Q8_0 for one, so that all three occur."""
    if "attn_output" in name:
        return Q8_0
    return Q6_K if any(part in name for part in ("attn_v", "ffn_down", "token_embd")) else Q4_K


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A random Llama with the vocabulary of the demo, as checkpoint and as GGUF in float32."""
    folder, demo = tmp_path_factory.mktemp("quantized"), open_checkpoint("demo")
    torch.manual_seed(0)
    of_demo = {name: demo.config[name] for name in ("vocab_size", "bos_token_id", "eos_token_id")}
    config = LlamaConfig(
        **SIZES, **of_demo, num_hidden_layers=2, max_position_embeddings=2048, initializer_range=0.08,
        tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "plain")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / "plain" / name).write_bytes((demo.folder / name).read_bytes())
    result = gguf(folder / "plain", folder / "f32.gguf")
    assert result.returncode == 0, result.stderr[-2000:]
    return folder


@pytest.fixture(scope="module")
def quantized(plain):
    """Quantize the matrices of a file with llama.cpp."""
    engine = ctypes.CDLL(sys.modules[llama_cpp.Server.__module__].__file__)
    engine.ggml_quantize_chunk.restype = ctypes.c_size_t
    header, raw = read_header(plain / "f32.gguf"), (plain / "f32.gguf").read_bytes()
    tensors, content, offset = [], [], 0
    for tensor in header.tensors:
        start = header.data_start + tensor.offset
        weights = raw[start : start + tensor.size]
        if len(tensor.shape) == 2:
            width, rows = tensor.shape
            tensor = replace(tensor, kind=kind_of(tensor.name))
            room = ctypes.create_string_buffer(tensor.size)
            numbers = map(ctypes.c_int64, (0, rows, width))
            assert engine.ggml_quantize_chunk(tensor.kind, weights, room, *numbers, None) == tensor.size
            weights = room.raw
        tensors.append(replace(tensor, offset=offset))
        content.append(weights + bytes(-len(weights) % header.alignment))
        offset += len(content[-1])
    path = plain / "quantized.gguf"
    path.write_bytes(replace(header, tensors=tuple(tensors)).to_bytes() + b"".join(content))
    assert {tensor.type_name for tensor in tensors} == {"F32", "Q4_K", "Q6_K", "Q8_0"}
    return path


@pytest.fixture(scope="module")
def weights(quantized):
    """Dequantize a file with llama.cpp's Python package, and return its tensors by their names in transformers."""
    sys.path.insert(0, str(Path(os.environ["LLAMA_CPP"]) / "gguf-py"))
    from gguf.quants import dequantize

    from gguf import GGUFReader

    held = {
        tensor.name: torch.tensor(dequantize(tensor.data, tensor.tensor_type)).view(*map(int, tensor.shape[::-1]))
        for tensor in GGUFReader(quantized).tensors
    }
    sys.path.pop(0)
    found = {"model.embed_tokens.weight": held["token_embd.weight"]}
    for layer in range(2):
        for name, other in NAMES.items():
            matrix = held[f"blk.{layer}.{other}.weight"]
            if name in ("q_proj", "k_proj"):  # llama.cpp pairs neighbours, transformers pairs halves.
                matrix = matrix.view(-1, SIZES["hidden_size"] // 16, 2, matrix.shape[1]).transpose(1, 2)
                matrix = matrix.reshape(-1, SIZES["hidden_size"])
            part = "self_attn" if "attn" in other else "mlp"
            found[f"model.layers.{layer}.{part}.{name}.weight"] = matrix
    return found


def flags_of(name):
    """Return the schedule as arguments of llama.cpp, if it has any."""
    kinds = llama_cpp.llama_rope_scaling_type
    return {
        "pi": {"rope_scaling_type": kinds.LLAMA_ROPE_SCALING_TYPE_LINEAR, "rope_freq_scale": 0.25},
        "yarn": {
            "rope_scaling_type": kinds.LLAMA_ROPE_SCALING_TYPE_YARN,
            "rope_freq_scale": 0.25,
            "yarn_orig_ctx": 2048,
        },
    }.get(name)


@pytest.mark.parametrize("name", ["pi", "ntk", "yarn", "ntk-by-parts", "llama3", "longrope"])
def test_quantized_weights_stay_and_are_read_at_other_positions(plain, quantized, weights, note, tmp_path, name):
    file = convert_gguf(quantized, tmp_path / "out.gguf", Recipe(RECIPES[name])).out
    assert all(check.is_passed for check in verify_gguf(file, quantized))
    source, result = read_header(quantized), read_header(file)
    raw, written = quantized.read_bytes(), file.read_bytes()
    there = {tensor.name: tensor for tensor in result.tensors}
    for tensor in source.tensors:
        own = there[tensor.name]
        begin, end = source.data_start + tensor.offset, result.data_start + own.offset
        assert own.kind == tensor.kind
        assert raw[begin : begin + tensor.size] == written[end : end + own.size]
    convert(plain / "plain", tmp_path / "checkpoint", Recipe(RECIPES[name]), check=False)
    served = asked(file)
    by_itself = differences(plain / "plain", asked(quantized), weights)
    found = differences(tmp_path / "checkpoint", served, weights)
    unconverted = differences(plain / "plain", served, weights)
    note("llama.cpp", f"{name}, Q4_K, Q6_K and Q8_0", found)
    note("llama.cpp", "  its source against itself", by_itself)
    assert max(found) < 2 * max(by_itself) < max(unconverted)
    if flags := flags_of(name):
        for one, own in zip(asked(quantized, **flags), served, strict=True):
            assert own == pytest.approx(one, abs=1e-4)
