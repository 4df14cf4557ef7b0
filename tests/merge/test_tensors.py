"""Changes of each stored tensor by an adapter or a full training, computed by hand, and mismatches."""

import json

import pytest
import torch
from safetensors.torch import save_file

from ctxext.errors import CtxextError
from ctxext.merge.tensors import AdapterChanges, WholeChanges, find_stored_name

STORED = {"layer.weight": (3, 2), "embed.weight": (5, 2), "norm.weight": (2,)}
TIED = {"head.weight": "embed.weight"}
A, B, MAGNITUDE = "layer.lora_A.weight", "layer.lora_B.weight", "layer.lora_magnitude_vector"
EMBED_A, EMBED_B, EMBED_MAGNITUDE = (
    f"embed.lora_{part}" for part in ("embedding_A", "embedding_B", "magnitude_vector.weight")
)


def adapter(folder, tensors, **config):
    """An adapter as saved by peft, with alpha 6."""
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "lora_alpha": 6, **config}))
    whole = {
        f"base_model.model.{name}": torch.as_tensor(tensor).float().clone(memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }
    save_file(whole, folder / "adapter_model.safetensors")
    return folder


def changed(folder, tensors, name, old, **config):
    """One tensor with an adapter added, as numbers."""
    old = torch.tensor(old)
    return (
        AdapterChanges(adapter(folder, tensors, **config), {name: tuple(old.shape)}, tied={})
        .compute(name, old)
        .tolist()
    )


def test_with_dora_rows_have_the_length_that_was_learned(tmp_path):
    tensors = {A: [[3.0, 4.0]], B: [[0.0], [1.0]], MAGNITUDE: [2.0, 10.0]}
    old = [[0.0, 5.0], [-15.0, -20.0]]  # And 6 times the product: (0, 5) and (3, 4), of length 5.
    assert changed(tmp_path, tensors, "layer.weight", old) == [[0, 2], [6, 8]]
    turned = changed(tmp_path, tensors, "layer.weight", [[0.0, -15.0], [5.0, -20.0]], fan_in_fan_out=True)
    assert turned == [[0, 6], [2, 8]]


@pytest.mark.parametrize("fan_in_fan_out", [False, True])
def test_embeddings_are_stored_as_rows_in_every_model(tmp_path, fan_in_fan_out):
    tensors = {EMBED_A: [[1.0, 0.0, 1.0]], EMBED_B: [[3.0], [0.5]]}
    given = {"name": "embed.weight", "old": [[0.0, 1.0], [24.0, 5.0], [-18.0, 0.0]], "fan_in_fan_out": fan_in_fan_out}
    assert changed(tmp_path, tensors, **given) == [[18, 4], [24, 5], [0, 3]]
    # For embeddings DoRA scales the columns, here with norms 30 and sqrt(50).
    scaled = changed(tmp_path, {**tensors, EMBED_MAGNITUDE: [5.0, 50.0**0.5]}, **given)
    assert torch.allclose(torch.tensor(scaled), torch.tensor([[3.0, 4.0], [4.0, 5.0], [0.0, 3.0]]))
    assert changed(tmp_path, {"norm.weight": [7.0, 8.0]}, "norm.weight", [1.0, 2.0]) == [7, 8]


@pytest.mark.parametrize(
    "shapes",
    [
        {A: (1, 2)},
        {B: (3, 1)},
        {A: (2, 2), B: (3, 1)},
        {A: (0, 2), B: (3, 0)},
        {A: (1, 2, 1), B: (3, 1)},
        {A: (1, 2), B: (3, 1), MAGNITUDE: (2,)},
        {A: (1, 2), B: (3, 1), MAGNITUDE: (3, 1)},
        {EMBED_A: (1, 5)},
        {EMBED_A: (1, 5), EMBED_B: (2, 2)},
        {EMBED_A: (1, 5), EMBED_B: (2, 1), EMBED_MAGNITUDE: (5,)},
    ],
)
def test_incompatible_matrices_are_refused(tmp_path, shapes):
    owner = "embed.weight" if EMBED_A in shapes else "layer.weight"
    folder = adapter(tmp_path / "odd", {name: torch.ones(shape) for name, shape in shapes.items()})
    with pytest.raises(CtxextError) as caught:
        AdapterChanges(folder, STORED, tied={})
    assert str(caught.value).splitlines()[0] == f'"{folder}" has missing or mismatched matrices for "{owner}".'


@pytest.mark.parametrize(
    ("shapes", "config", "message"),
    [
        ({A: (1, 3), B: (2, 1)}, {}, '"layer.weight" has shape (2, 3), expected (3, 2).'),
        ({A: (1, 2), B: (3, 1)}, {"fan_in_fan_out": True}, '"layer.weight" has shape (2, 3), expected (3, 2).'),
        ({"norm.weight": (3,)}, {}, '"norm.weight" has shape (3,), expected (2,).'),
        ({"head.weight": (5, 3)}, {}, '"head.weight" has shape (5, 3), expected (5, 2).'),
    ],
)
def test_other_shapes_than_the_checkpoint_s_are_refused(tmp_path, shapes, config, message):
    folder = adapter(tmp_path / "odd", {name: torch.ones(shape) for name, shape in shapes.items()}, **config)
    with pytest.raises(CtxextError) as caught:
        AdapterChanges(folder, STORED, tied=TIED)
    assert str(caught.value).splitlines()[0] == f'"{folder}" does not fit: {message}'


def test_only_layers_with_matrices_are_stored_transposed(tmp_path):
    shapes = {A: (1, 3), B: (2, 1), "norm.weight": (2,), EMBED_A: (1, 5), EMBED_B: (2, 1)}
    tensors = {name: torch.ones(shape) for name, shape in shapes.items()}
    assert AdapterChanges(adapter(tmp_path, tensors, fan_in_fan_out=True), STORED, tied={}).names == STORED.keys()


def test_what_another_model_has_and_what_is_no_adapter_is_refused(tmp_path):
    folder = adapter(tmp_path / "odd", {"other.weight": torch.ones(2)})
    with pytest.raises(CtxextError, match=r'changes "other\.weight", which this checkpoint does not have') as caught:
        AdapterChanges(folder, STORED, tied={})
    assert caught.value.hint == "Pass the adapter's base model."
    path = folder / "adapter_model.safetensors"
    header = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}'  # Four unused bytes before it.
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"12345678")
    with pytest.raises(
        CtxextError, match=r'"adapter_model\.safetensors" is .+ not a safetensors file: "a" begins at byte 4'
    ):
        AdapterChanges(folder, STORED, tied={})
    path.unlink()
    with pytest.raises(CtxextError, match=rf'^"{folder}" has no adapter_model\.safetensors'):
        AdapterChanges(folder, STORED, tied={})


def test_the_embedding_that_peft_saves_beside_its_matrices_is_no_change(tmp_path):
    folder = adapter(tmp_path, {"embed.base_layer.weight": torch.ones(5, 2), "norm.weight": torch.ones(2)})
    assert AdapterChanges(folder, STORED, tied={}).names == {"norm.weight"}


ROWS, COLUMNS = torch.arange(5.0)[:, None], torch.tensor([[1.0, 2.0]])
EMBEDDING = {EMBED_A: ROWS.T, EMBED_B: COLUMNS.T}
HEAD = {"head.lora_A.weight": COLUMNS, "head.lora_B.weight": ROWS}
BOTH = {"embed.weight", "head.weight"}


@pytest.mark.parametrize(
    ("tensors", "is_tied", "names", "is_cut"),
    [
        ({}, False, set(), False),
        ({**EMBEDDING, **HEAD}, False, {"embed.weight"}, False),
        ({**EMBEDDING, **HEAD, "head.lora_A.weight": 2 * COLUMNS}, False, BOTH, True),
        ({**EMBEDDING, **HEAD, "head.lora_B.weight": 2 * ROWS}, False, BOTH, True),
        ({"embed.weight": ROWS * COLUMNS, "head.weight": ROWS * COLUMNS}, False, {"embed.weight"}, False),
        ({"embed.weight": ROWS * COLUMNS, "head.weight": ROWS + COLUMNS}, False, BOTH, True),
        ({"embed.weight": ROWS * COLUMNS, **HEAD}, False, BOTH, True),
        ({**EMBEDDING, "head.weight": ROWS * COLUMNS}, False, BOTH, True),
        (EMBEDDING, False, {"embed.weight"}, True),
        (EMBEDDING, True, {"embed.weight"}, False),
        (HEAD, True, {"head.weight"}, True),
    ],
)
def test_a_tie_stays_if_both_change_equally(tmp_path, tensors, is_tied, names, is_cut):
    folder = adapter(tmp_path, {**tensors, "norm.weight": torch.ones(2)}, ensure_weight_tying=is_tied)
    changes = AdapterChanges(folder, STORED, tied=TIED)
    assert (changes.names, changes.untied) == ({*names, "norm.weight"}, TIED if is_cut else {})
    # A tied output embedding that is also stored changes like the input embedding.
    stored = AdapterChanges(folder, {**STORED, "head.weight": (5, 2)}, tied=TIED)
    assert stored.names == ({*names, "norm.weight"} if is_cut or not tensors else BOTH | {"norm.weight"})
    if not is_cut and tensors:
        assert torch.equal(
            stored.compute("head.weight", torch.zeros(5, 2)), stored.compute("embed.weight", torch.zeros(5, 2))
        )


@pytest.mark.parametrize("first", [{}, {"embed.weight": torch.ones(5, 2)}])
def test_every_tie_is_looked_at(tmp_path, first):
    """If the first one stays tied, a second one that was untied in training is still untied."""
    stored, tied = {**STORED, "late.weight": (1,)}, {**TIED, "late.head.weight": "late.weight"}
    for number, is_cut in ((1.0, False), (2.0, True)):
        tensors = {**first, "late.weight": [1.0], "late.head.weight": [number]}
        folder = adapter(tmp_path / str(number), tensors, ensure_weight_tying=True)
        assert AdapterChanges(folder, stored, tied=tied).untied == (tied if is_cut else {})


def whole(folder, *shards):
    folder.mkdir()
    for number, tensors in enumerate(shards):
        save_file(tensors, folder / f"model-{number}.safetensors")
    return folder


def test_a_whole_training_gives_every_tensor_by_its_stored_name(tmp_path):
    embedding = ROWS * COLUMNS
    folder = whole(tmp_path / "new", {"embed.weight": embedding}, {"base.norm.weight": torch.tensor([7.0, 8.0])})
    changes = WholeChanges(folder, STORED, tied=TIED)
    assert (changes.names, changes.untied) == ({"embed.weight", "norm.weight"}, {})
    assert changes.compute("norm.weight", torch.zeros(2)).tolist() == [7, 8]
    # A tied output embedding that is also stored becomes the new input embedding.
    stored = WholeChanges(folder, {**STORED, "head.weight": (5, 2)}, tied=TIED)
    assert stored.names == {"embed.weight", "norm.weight", "head.weight"}
    assert torch.equal(stored.compute("head.weight", torch.zeros(5, 2)), embedding)


def test_a_full_training_may_contain_only_a_tied_head_in_addition(tmp_path):
    embedding = ROWS * COLUMNS
    folder = whole(tmp_path / "new", {"embed.weight": embedding, "head.weight": embedding + 0})
    assert WholeChanges(folder, STORED, tied=TIED).names == {"embed.weight"}
    with pytest.raises(CtxextError) as caught:
        WholeChanges(folder, STORED, tied={})
    assert str(caught.value) == 'The trained model has "head.weight", which the base does not have.'


@pytest.mark.parametrize(
    ("owner", "place"),
    [
        ("layer.weight", "layer.weight"),
        ("transformer.layer.weight", "layer.weight"),
        ("tokens.weight", "model.tokens.weight"),
        ("bert.LayerNorm.weight", "bert.LayerNorm.gamma"),
        ("bert.LayerNorm.bias", "bert.LayerNorm.beta"),
        ("layer", None),
        ("a.b.layer.weight", None),
    ],
)
def test_the_name_under_which_a_parameter_is_stored(owner, place):
    stored = ["layer.weight", "model.tokens.weight", "bert.LayerNorm.gamma", "bert.LayerNorm.beta"]
    assert find_stored_name(owner, stored) == place
