"""How Ms-PoE rotates: in pieces or at once, and one row of all layers together, bit for bit the same."""

from types import SimpleNamespace

import pytest
import torch
from transformers import DynamicCache
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from ctxext.portable import mspoe
from ctxext.portable.method import Frame, Turn, compute_tables, state_of
from ctxext.portable.mspoe import MsPoE

BASE = torch.tensor([10000.0 ** (-i / 8) for i in range(8)])
RANKS = [[0, 1, 2], [2, 0, 1]]


def plain(tensors, tables, axis, call):
    """Llama's rotation of a query and a key."""
    return list(apply_rotary_pos_emb(*tensors, *tables, unsqueeze_dim=axis))


def rotated(ranks, layer, length, axis, batch=1, cache=None, memory=None, start=5):
    """Rotated query and key of a layer, six query heads and three KV heads."""
    draw = torch.Generator().manual_seed(layer)
    tensors = [torch.randn(batch, length, heads, 16, generator=draw) for heads in (6, 3)]
    tensors = [tensor.transpose(1, 2) for tensor in tensors] if axis == 1 else tensors
    settings = {"ratios": [1.0, 1.4, 1.8], "layers": [0, 1], "schedule": "linear", "rescale": "uniform"}
    method = MsPoE({**settings, "variant": "paper", **({"ranks": ranks} if ranks else {})})
    call = SimpleNamespace(
        layer=layer, kv_heads=3, first_head=0, cache=cache, mask=None, layer_memory={}, methods=[method]
    )
    call.memory = {} if memory is None else memory
    if "tables" not in call.memory:
        frame = Frame(BASE, torch.arange(16) % 8, 1.0, torch.float32)
        call.memory["tables"] = method.tables(
            compute_tables, frame, Turn(torch.arange(start, start + length)[None], None)
        )
    return method.rotate(plain, tensors, call.memory["tables"], axis, call)


@pytest.mark.parametrize("axis", [1, 2])
@pytest.mark.parametrize("batch", [1, 2])
def test_pieces_are_bit_equal_to_the_whole(axis, batch, monkeypatch):
    monkeypatch.setattr(mspoe, "PIECE", 1 << 30)
    whole = rotated(RANKS, 1, 101, axis, batch)
    monkeypatch.setattr(mspoe, "PIECE", 1)
    assert all(map(torch.equal, rotated(RANKS, 1, 101, axis, batch), whole))


@pytest.mark.parametrize("axis", [1, 2])
@pytest.mark.parametrize("kept", [False, True])
def test_one_row_of_a_layer_takes_the_ratios_of_that_layer(axis, kept):
    """Whether the ratios are the recipe's or kept with the cache; tables of all layers are picked together."""
    cache, memory = DynamicCache(), {}
    for layer in range(2) if kept else ():
        state_of(cache).rows["mspoe", layer] = torch.tensor([RANKS[layer]])
    for layer in range(2):
        row = rotated(None if kept else RANKS, layer, 1, axis, cache=cache, memory=memory)
        draw = torch.Generator().manual_seed(layer)
        states = [torch.randn(1, 1, heads, 16, generator=draw) for heads in (6, 3)]
        for tensor, result in zip(states, row, strict=True):
            for head in range(tensor.shape[2]):
                ratio = [1.0, 1.4, 1.8][RANKS[layer][head // (tensor.shape[2] // 3)]]
                angles = 5.0 * (BASE / ratio).repeat(2)
                one = tensor[:, :, head : head + 1].transpose(1, 2)
                expected = apply_rotary_pos_emb(one, one, angles.cos()[None, None], angles.sin()[None, None])[0]
                found = result[:, head] if axis == 1 else result[:, :, head]
                torch.testing.assert_close(found, expected[:, 0])


def test_frequencies_follow_the_models():
    """They are kept from call to call, until the model's own change, as those of `dynamic` do with the length."""
    settings = {"ratios": [1.0, 2.0], "layers": [0], "schedule": "linear", "rescale": "uniform", "ranks": [[0, 1]]}
    method = MsPoE(settings)
    frame = Frame(BASE.clone(), torch.arange(16) % 8, 1.0, torch.float32)
    first = method.frequencies(frame)
    assert method.frequencies(frame) is first
    frame.inverse.mul_(0.5)
    assert torch.equal(method.frequencies(frame), first * 0.5)
