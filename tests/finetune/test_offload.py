"""--offload-activations: what checkpointing keeps leaves the accelerator, nothing else, and nothing changes."""

import copy
import dataclasses

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ctxext.errors import CtxextError
from ctxext.finetune.dry_run import dry_run
from ctxext.finetune.loss import use_chunked_loss
from tiny_base import QUICK, SIZES, documents, tune

LENGTH = 24


@pytest.fixture
def moved(monkeypatch):
    """What is moved, on a machine whose processor plays both parts: kept as a copy, given back as another."""
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


def test_loss_and_gradients_are_bit_equal_and_only_inputs_of_layers_move(moved):
    torch.manual_seed(0)
    plain = LlamaForCausalLM(LlamaConfig(**SIZES)).train()
    plain.model.embed_tokens.requires_grad_(False)  # As with LoRA.
    plain.lm_head.requires_grad_(False)
    plain.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    offloaded = copy.deepcopy(plain)
    use_chunked_loss(plain)
    use_chunked_loss(offloaded, offloads=True)
    ids = torch.randint(3, 50, (2, LENGTH))
    given = {"input_ids": ids, "labels": ids, "position_ids": torch.arange(LENGTH).expand(2, -1)}
    losses = [plain(**given).loss]
    assert not moved
    losses.append(offloaded(**given).loss)
    assert torch.equal(*losses)
    for loss in losses:
        loss.backward()
    for (name, one), two in zip(plain.named_parameters(), offloaded.parameters(), strict=True):
        assert (one.grad is None) == (two.grad is None), name
        assert one.grad is None or torch.equal(one.grad, two.grad), name
    inputs = [tensor for tensor in moved if tensor.shape == (2, LENGTH, SIZES["hidden_size"])]
    assert len(inputs) >= SIZES["num_hidden_layers"]
    weights = {tuple(weight.shape) for weight in plain.parameters() if weight.ndim == 2}
    assert not [tensor.shape for tensor in moved if tuple(tensor.shape) in weights]


def test_a_processor_has_nothing_to_move(base, tmp_path):
    options = dataclasses.replace(QUICK, offload_activations=True, device="cpu")
    message = "--offload-activations moves what a step keeps out of an accelerator's memory, and none is in use"
    with pytest.raises(CtxextError, match=message):
        tune(base, tmp_path / "out", options)
    with pytest.raises(CtxextError, match=message):
        dry_run(str(base), lambda *_: documents(), options)
    assert options.settled(window=64, trained_length=32).checkpointing
