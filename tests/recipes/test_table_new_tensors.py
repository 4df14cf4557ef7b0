"""Which tensors a longer table changes, and which weights it cannot be made of."""

import json
import struct

import numpy as np
import pytest

from ctxext.checkpoint.opening import Checkpoint
from ctxext.errors import CtxextError
from ctxext.files.tensor_files import BITS, NewTensor, format_tensor_names
from ctxext.recipes.methods.table import Table
from ctxext.recipes.model_config import model_config

WIDTH = 2
GPT2 = {"model_type": "gpt2", "n_positions": 3}
ROBERTA = {"model_type": "roberta", "max_position_embeddings": 5, "pad_token_id": 1}
BART = {"model_type": "bart", "max_position_embeddings": 3}
ENCODER, DECODER = "model.encoder.embed_positions.weight", "model.decoder.embed_positions.weight"


def source(folder, config, *files) -> Checkpoint:
    """A checkpoint whose files hold tensors of zeros, each given as its name with its shape and its type."""
    for number, tensors in enumerate(files, 1):
        header, end = {}, 0
        for name, (shape, dtype) in tensors.items():
            size = int(np.prod(shape)) * BITS.get(dtype, 8) // 8
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + size]}
            end += size
        text = json.dumps(header).encode()
        name = "model.safetensors" if len(files) == 1 else f"model-{number:05}-of-{len(files):05}.safetensors"
        (folder / name).write_bytes(struct.pack("<Q", len(text)) + text + bytes(end))
    return Checkpoint("mine", folder, config)


def made(folder, step, config, *files):
    return step.new_tensors(source(folder, config, *files), model_config(dict(config)))


@pytest.mark.parametrize(
    ("config", "tensors", "message"),
    [
        (GPT2, {"wte.weight": ((3, WIDTH), "F32")}, "have no position table wpe.weight"),
        (
            GPT2,
            {"a.wpe.weight": ((3, WIDTH), "F32"), "b.wpe.weight": ((3, WIDTH), "F32")},
            r"have several position tables: a\.wpe\.weight, b\.wpe\.weight",
        ),
        (
            BART,
            dict.fromkeys((ENCODER, DECODER, f"x.{ENCODER}"), ((5, WIDTH), "F32")),
            "have several position tables: ",
        ),
        (GPT2, {"wpe.weight": ((4, WIDTH), "F32")}, r"has the shape \[4, 2\]; config.json specifies 3 rows"),
        (GPT2, {"wpe.weight": ((2, 3), "F32")}, r"has the shape \[2, 3\]; config.json specifies 3 rows"),
        (GPT2, {"wpe.weight": ((3,), "F32")}, r"has the shape \[3\]; config.json specifies 3 rows"),
        (GPT2, {"wpe.weight": ((3, WIDTH, 1), "F32")}, r"has the shape \[3, 2, 1\]; config.json specifies 3 rows"),
        (ROBERTA, {"embeddings.position_embeddings.weight": ((3, WIDTH), "F32")}, "config.json specifies 5 rows"),
        (GPT2, {"wpe.weight": ((3, WIDTH), "F8_E4M3")}, "is F8_E4M3, which is not supported"),
    ],
)
def test_weights_without_such_a_table(config, tensors, message, tmp_path):
    with pytest.raises(CtxextError, match=message):
        made(tmp_path, Table(factor=2), config, tensors)


def test_what_was_left_on_the_hub_is_not_looked_for(tmp_path):
    checkpoint = Checkpoint("you/model", tmp_path, GPT2, remote_sizes={"model.safetensors": 24})
    assert Table(factor=2).new_tensors(checkpoint, model_config(dict(GPT2))) == ()


def test_stored_tensors(tmp_path):
    one, two = {"a": ((2,), "F32")}, {"b": ((3,), "F16")}
    stored = source(tmp_path, GPT2, one, two).stored_tensors()
    assert {name: (path.as_posix(), entry["shape"]) for name, (path, entry) in stored.items()} == {
        "a": ("model-00001-of-00002.safetensors", [2]),
        "b": ("model-00002-of-00002.safetensors", [3]),
    }
    with pytest.raises(
        CtxextError, match=r'2.safetensors" contains "a", which "model-00001-of-00002.safetensors" contains'
    ):
        source(tmp_path, GPT2, one, one).stored_tensors()


def test_weights_of_another_form_hold_no_tensors(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(CtxextError, match=r'"mine" has its weights in pytorch_model\.bin') as caught:
        Checkpoint("mine", tmp_path, GPT2).stored_tensors()
    assert "save_pretrained" in caught.value.hint


def test_names_in_a_few_words(tmp_path):
    assert format_tensor_names(["a.0.w", "a.1.w", "b"]) == "a.*.w × 2, b"
    assert format_tensor_names(["a.10.w"]) == "a.*.w"
    assert str(NewTensor("w", tmp_path, "F32", None, (2, 3), iter)) == "w new, 2×3"
