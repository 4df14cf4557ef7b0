"""--mlp-tile: feed-forward parts tile by tile give the same loss and gradients, and hold less in between."""

import copy
import dataclasses
import os
import subprocess
import sys

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from ctxext.errors import CtxextError
from ctxext.finetune.tiles import tile_mlps
from tiny_base import QUICK, SIZES, tune


def build(kind):
    torch.manual_seed(0)
    if kind == "gpt2":
        sizes = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
        return GPT2LMHeadModel(GPT2Config(**sizes, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)).train()
    return LlamaForCausalLM(LlamaConfig(**SIZES)).train()


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_loss_and_gradients_are_the_same(kind, checkpointing):
    plain = build(kind)
    tiled = copy.deepcopy(plain)
    tile_mlps(tiled, 7)
    ids = torch.randint(2, 64, (2, 40), generator=torch.Generator().manual_seed(1))
    widest = []
    for layer in tiled.modules():
        if isinstance(layer, torch.nn.Linear) or "Conv1D" in type(layer).__name__:
            layer.register_forward_hook(lambda _, __, output: widest.append(output.shape))
    losses = []
    for model in (plain, tiled):
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        losses.append(loss.item())
    assert abs(losses[0] - losses[1]) <= 1e-6
    for one, two in zip(plain.parameters(), tiled.parameters(), strict=True):
        assert torch.allclose(one.grad, two.grad, atol=1e-6)
    inner = 128 if kind == "gpt2" else 48
    assert {shape[1] for shape in widest if shape[-1] == inner} == {7, 5}


def test_a_part_that_looks_at_its_neighbours_is_refused():
    model = build("llama")
    for layer in model.model.layers:
        layer.mlp = torch.nn.Softmax(dim=1)
    with pytest.raises(CtxextError, match="no feed-forward part"):
        tile_mlps(model, 7)


def test_a_run_with_tiles_learns_the_same(base, tmp_path):
    options = dataclasses.replace(QUICK, steps=3)
    plain = tune(base, tmp_path / "plain", options, merge=False)
    tiled = tune(base, tmp_path / "tiled", dataclasses.replace(options, mlp_tile=9, checkpointing=True), merge=False)
    for (_, one), (_, two) in zip(plain.losses, tiled.losses, strict=True):
        assert abs(one - two) <= 1e-6


_PEAK = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from ctxext.files.processes import forget_peak, peak_memory
from ctxext.finetune.tiles import tile_mlps

torch.set_num_threads(1)
sizes = dict(hidden_size=64, intermediate_size=8192, num_attention_heads=2, num_key_value_heads=2)
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=2, **sizes))
tile_mlps(model, 256)
ids = torch.randint(0, 64, (1, 2048))
forget_peak(model.device)
before = peak_memory(model.device)
for _ in range(2):
    model(input_ids=ids, labels=ids).loss.backward()
print((peak_memory(model.device) - before) / 2**20)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="The allocator is told so on Linux alone.")
def test_memory_of_tiles_is_given_back():
    """A process of its own takes 124 MiB; 287 where glibc keeps what it likes, and 704 without tiles."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    done = subprocess.run([sys.executable, "-c", _PEAK], capture_output=True, text=True, env=environment, check=True)
    assert 0 < float(done.stdout.split()[-1]) < 200
