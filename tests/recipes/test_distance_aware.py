"""Which weights distance-aware attention adds, by the names and files of the source alone."""

import json
import struct

import pytest

from ctxext.checkpoint.opening import Checkpoint
from ctxext.errors import CtxextError
from ctxext.recipes.methods.distance_aware import DistanceAware
from ctxext.recipes.model_config import model_config

CONFIG = {"model_type": "llama", "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}
CONFIG |= {"max_position_embeddings": 64, "rope_theta": 1e4}
QUERY = "model.layers.{}.self_attn.q_proj.weight"


def write(folder, name, tensors, numbers=1):
    """A safetensors file whose tensors all have so many numbers."""
    header, at = {}, 0
    for tensor in tensors:
        header[tensor] = {"dtype": "F32", "shape": [numbers], "data_offsets": [at, at + 4 * numbers]}
        at += 4 * numbers
    text = json.dumps(header).encode()
    (folder / name).write_bytes(struct.pack("<Q", len(text)) + text + bytes(at))


def added(folder, **more):
    source = Checkpoint("x", folder, {**CONFIG, **more})
    return DistanceAware().new_tensors(source, model_config(source.config))


def test_two_numbers_for_every_head_of_every_layer(tmp_path):
    names = [QUERY.format(layer) for layer in range(2)]
    write(tmp_path, "model.safetensors", [*names, "model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight"])
    first, second = added(tmp_path)
    assert [first.name, second.name] == [f"model.layers.{layer}.self_attn.distance.weight" for layer in range(2)]
    for tensor in (first, second):
        assert (tensor.dtype, tensor.old_shape, tensor.shape) == ("F32", None, (2, 4))
        assert list(tensor.pieces(memoryview(b""))) == [bytes(2 * 4 * 4)]
        assert str(tensor.path) == "model.safetensors"
    assert DistanceAware().settings(model_config(CONFIG)) == {
        "layers": [0, 1], "num_heads": 4, "original_length": 64
    }  # fmt: skip


def test_learned_weights_are_in_the_smallest_or_first_file(tmp_path):
    write(tmp_path, "model-00001-of-00003.safetensors", [QUERY.format(0)], numbers=9)
    write(tmp_path, "model-00002-of-00003.safetensors", [QUERY.format(1)], numbers=3)
    write(tmp_path, "model-00003-of-00003.safetensors", [QUERY.format(2)], numbers=3)
    assert {str(tensor.path) for tensor in added(tmp_path)} == {"model-00002-of-00003.safetensors"}


def test_other_towers_have_separate_layers(tmp_path):
    towers = ["vision_tower.layers.0.self_attn.q_proj.weight", "encoder.layers.0.attention.q.weight"]
    write(tmp_path, "model.safetensors", [QUERY.format(0), *towers, QUERY.format(1)])
    assert [tensor.name.split(".distance")[0] for tensor in added(tmp_path)] == [
        "model.layers.0.self_attn", "model.layers.1.self_attn"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([QUERY.format(0)], "Layer 1 has no attention with a known name."),
        (
            [*(QUERY.format(layer) for layer in range(2)), "other.layers.1.attn.q.weight"],
            "Layer 1 has several attentions: model.layers.1.self_attn, other.layers.1.attn.",
        ),
    ],
)
def test_one_attention_for_each_layer(names, message, tmp_path):
    write(tmp_path, "model.safetensors", names)
    with pytest.raises(CtxextError) as caught:
        added(tmp_path)
    assert caught.value.message == message


def test_weights_left_on_the_hub_are_not_read(tmp_path):
    source = Checkpoint("x", tmp_path, CONFIG, remote_sizes={"model.safetensors": 9})
    assert DistanceAware().new_tensors(source, model_config(CONFIG)) == ()
    with pytest.raises(CtxextError, match=r"pytorch_model\.bin"):
        added(tmp_path)
