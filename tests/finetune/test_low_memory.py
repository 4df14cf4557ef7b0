"""--low-memory: the same losses and gradients with feed-forward blocks in tiles and activations off the accelerator."""

import copy
import dataclasses
import os
import subprocess
import sys

import pytest
import torch

import tiny_models
from ctxext.errors import CtxextError
from ctxext.finetune import prepare
from ctxext.finetune import tiles as tiles_module
from ctxext.finetune.loss import use_chunked_loss
from ctxext.finetune.options import TrainingOptions
from ctxext.finetune.tiles import tile_blocks
from tiny_base import QUICK, tune

LENGTH = 24
FAMILIES = ("llama", "gpt2", "mixtral", "llama4_text", "gemma3n_text", "falcon_h1", "modernbert")


def compute(model, *, checkpointing=True):
    """The loss of two sequences, and the gradients of all weights."""
    if checkpointing and model.supports_gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.zero_grad()
    ids = torch.randint(3, 60, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(LENGTH).expand(2, -1)
    loss = model(input_ids=ids, labels=ids, position_ids=positions).loss
    loss.backward()
    return loss.detach(), {name: weight.grad for name, weight in model.named_parameters()}


def build(family):
    model = tiny_models.build(family).train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


@pytest.fixture
def tiles(monkeypatch):
    """The numbers of tokens that were computed at once."""
    sizes = []
    checkpoint = tiles_module.checkpoint

    def recorded(forward, tile, **options):
        sizes.append(tile.shape[-2])
        return checkpoint(forward, tile, **options)

    monkeypatch.setattr(tiles_module, "checkpoint", recorded)
    return sizes


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_tiles_have_the_same_loss_and_gradients(family, checkpointing, tiles):
    plain = build(family)
    tiled = copy.deepcopy(plain)
    assert tile_blocks(tiled, LENGTH) >= tiny_models.NUM_LAYERS
    for model in (plain, tiled):
        use_chunked_loss(model)
    (loss, gradients), (other, others) = (compute(model, checkpointing=checkpointing) for model in (plain, tiled))
    assert max(tiles) == LENGTH // 8
    assert abs(loss - other) <= 1e-6 * loss
    for name, gradient in gradients.items():
        assert (gradient is None) == (others[name] is None)
        if gradient is not None:
            assert (gradient - others[name]).abs().max() <= 1e-5 * gradient.abs().max().clamp(min=1e-3), name


def test_what_reads_other_tokens_is_not_tiled():
    model = build("llama")
    for layer in model.model.layers:
        layer.mlp = torch.nn.Sequential(layer.mlp.gate_proj, torch.nn.Softmax(dim=1), layer.mlp.down_proj)
    assert tile_blocks(model, LENGTH) == 0


@pytest.fixture
def moved(monkeypatch):
    """What leaves an accelerator, on a CPU that acts as both devices: it is kept as a copy."""
    tensors = []

    class Moving(torch.autograd.graph.saved_tensors_hooks):
        def __init__(self, pin_memory):
            assert pin_memory
            super().__init__(self.pack, lambda tensor: tensor.clone())

        def pack(self, tensor):
            tensors.append(tensor.clone())
            return tensors[-1]

    monkeypatch.setattr(torch.autograd.graph, "save_on_cpu", Moving)
    return tensors


def test_only_inputs_of_layers_leave_the_accelerator(moved):
    plain = build("llama")
    plain.model.embed_tokens.requires_grad_(False)  # As with LoRA.
    plain.lm_head.requires_grad_(False)
    offloaded = copy.deepcopy(plain)
    use_chunked_loss(plain)
    use_chunked_loss(offloaded, offloads=True)
    expected = compute(plain)
    assert not moved
    loss, gradients = compute(offloaded)
    assert torch.equal(loss, expected[0])
    for name, gradient in expected[1].items():
        assert gradient is None or torch.equal(gradient, gradients[name]), name
    width = plain.config.hidden_size
    assert len([tensor for tensor in moved if tensor.shape == (2, LENGTH, width)]) >= plain.config.num_hidden_layers
    weights = {weight.shape for weight in plain.parameters() if weight.ndim == 2}
    assert not [tensor.shape for tensor in moved if tensor.shape in weights]


def test_a_run_learns_the_same(base, tmp_path, tiles, monkeypatch):
    options = dataclasses.replace(QUICK, steps=3)
    plain = tune(base, tmp_path / "plain", options, merge=False)
    assert not tiles
    less = tune(base, tmp_path / "less", dataclasses.replace(options, low_memory=True), merge=False)
    assert max(tiles) == QUICK.length // 8
    for (_, one), (_, two) in zip(plain.losses, less.losses, strict=True):
        assert abs(one - two) <= 1e-6
    monkeypatch.setattr(prepare, "tile_blocks", lambda *_: 0)
    with pytest.raises(CtxextError, match='--low-memory has no effect on "llama" here'):
        tune(base, tmp_path / "out", dataclasses.replace(options, low_memory=True))
    with pytest.raises(CtxextError, match="--low-memory cannot be combined with --no-checkpointing"):
        TrainingOptions(low_memory=True, checkpointing=False)
    assert dataclasses.replace(QUICK, low_memory=True).resolve(window=64, trained_length=32).checkpointing


_PEAK = """
import sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from ctxext.files.processes import forget_peak, peak_memory, return_blocks
from ctxext.finetune.tiles import tile_blocks

return_blocks()
torch.set_num_threads(1)
sizes = dict(hidden_size=64, intermediate_size=8192, num_attention_heads=2, num_key_value_heads=2)
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=2, **sizes))
if sys.argv[1] == "tiles":
    tile_blocks(model, 2048)
ids = torch.randint(0, 64, (1, 2048))
forget_peak(model.device)
before = peak_memory(model.device)
for _ in range(2):
    model(input_ids=ids, labels=ids).loss.backward()
print((peak_memory(model.device) - before) / 2**20)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Other systems do not return freed memory at once.")
@pytest.mark.thorough
def test_tiles_need_less_memory():
    """A feed-forward block whose inner activations are nearly all of the memory."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    command = [sys.executable, "-c", _PEAK]
    plain, tiled = (
        float(subprocess.run([*command, kind], capture_output=True, text=True, env=environment, check=True).stdout)
        for kind in ("whole", "tiles")
    )
    assert 0 < tiled < plain / 3, (plain, tiled)
