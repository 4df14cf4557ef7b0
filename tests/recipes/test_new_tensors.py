"""Which tensors a longer table changes, and which weights it cannot be made of."""

import json
import struct

import numpy as np
import pytest

from ctxext.checkpoint.opening import Checkpoint
from ctxext.errors import CtxextError
from ctxext.files.tensor_files import BITS, NewTensor, grouped
from ctxext.recipes.encodings.rotary import model_config
from ctxext.recipes.methods.range import Range
from ctxext.recipes.methods.table import Table

WIDTH = 2
GPT2 = {"model_type": "gpt2", "n_positions": 3}
ROBERTA = {"model_type": "roberta", "max_position_embeddings": 5, "pad_token_id": 1}
BART = {"model_type": "bart", "max_position_embeddings": 3}
OPT = {"model_type": "opt", "max_position_embeddings": 3}
PEGASUS = {"model_type": "pegasus", "max_position_embeddings": 3}
M2M = {"model_type": "m2m_100", "max_position_embeddings": 3}
LED = {"model_type": "led", "max_encoder_position_embeddings": 3}
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
    ("config", "step", "tensors", "expected"),
    [
        (GPT2, Table(factor=2), {"wpe.weight": ((3, WIDTH), "F32"), "w": ((9, 2), "F32")}, ["wpe.weight 3×2 → 6×2"]),
        (GPT2, Table(factor=2), {"transformer.wpe.weight": ((3, WIDTH), "BF16")}, ["transformer.wpe.weight 3×2 → 6×2"]),
        (
            ROBERTA,  # Two rows for others, which no factor stretches.
            Table(factor=2),
            {
                "roberta.embeddings.position_embeddings.weight": ((5, WIDTH), "F16"),
                "roberta.embeddings.position_ids": ((1, 5), "I64"),
                "roberta.embeddings.token_type_ids": ((1, 5), "I64"),
            },
            [
                "roberta.embeddings.position_embeddings.weight 5×2 → 8×2",
                "roberta.embeddings.position_ids 1×5 → 1×8",
                "roberta.embeddings.token_type_ids 1×5 → 1×8",
            ],
        ),
        (OPT, Table(factor=3), {DECODER: ((5, WIDTH), "F32")}, [f"{DECODER} 5×2 → 11×2"]),
        (
            BART,
            Table(factor=2),
            {DECODER: ((5, WIDTH), "F32"), ENCODER: ((5, WIDTH), "F32")},
            [f"{ENCODER} 5×2 → 8×2", f"{DECODER} 5×2 → 8×2"],
        ),
        (LED, Table(factor=2), {ENCODER: ((3, WIDTH), "F32"), DECODER: ((3, WIDTH), "F32")}, [f"{ENCODER} 3×2 → 6×2"]),
        (PEGASUS, Range(factor=2), {ENCODER: ((3, WIDTH), "F32")}, [f"{ENCODER} 3×2 → 6×2"]),
        (PEGASUS, Range(factor=2), {"x": ((1,), "F32")}, []),  # It can be computed.
        (M2M, Range(factor=2), {"x": ((1,), "F32")}, []),
    ],
    ids=lambda value: value.get("model_type", "") if isinstance(value, dict) else "",
)  # fmt: skip
def test_what_is_lengthened(config, step, tensors, expected, tmp_path):
    lengthened = made(tmp_path, step, config, tensors)
    assert [str(one) for one in lengthened] == expected
    assert {one.path.as_posix() for one in lengthened} <= {"model.safetensors"}
    for one in lengthened:
        assert one.dtype == tensors[one.name][1]
        assert one.old_shape == tensors[one.name][0]
        raw = memoryview(bytes(int(np.prod(one.old_shape)) * BITS[one.dtype] // 8))
        assert len(b"".join(one.pieces(raw))) == int(np.prod(one.shape)) * BITS[one.dtype] // 8


def test_the_rows_are_those_of_the_fill(tmp_path):
    (tensor,) = made(tmp_path, Table(factor=2), OPT, {"embed_positions.weight": ((5, WIDTH), "F32")})
    rows = np.arange(5 * WIDTH, dtype="<f4").reshape(5, WIDTH)
    written = np.frombuffer(b"".join(tensor.pieces(memoryview(rows.tobytes()))), "<f4").reshape(tensor.shape)
    assert (written == rows[[0, 1, 2, 3, 4, 2, 3, 4]]).all(), "two rows for others, then the positions again"


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
        (GPT2, {"wpe.weight": ((4, WIDTH), "F32")}, r"has the shape \[4, 2\]; config.json says 3 rows"),
        (GPT2, {"wpe.weight": ((2, 3), "F32")}, r"has the shape \[2, 3\]; config.json says 3 rows"),
        (GPT2, {"wpe.weight": ((3,), "F32")}, r"has the shape \[3\]; config.json says 3 rows"),
        (GPT2, {"wpe.weight": ((3, WIDTH, 1), "F32")}, r"has the shape \[3, 2, 1\]; config.json says 3 rows"),
        (ROBERTA, {"embeddings.position_embeddings.weight": ((3, WIDTH), "F32")}, "config.json says 5 rows"),
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
    with pytest.raises(CtxextError, match=r'2.safetensors" holds "a", which "model-00001-of-00002.safetensors" holds'):
        source(tmp_path, GPT2, one, one).stored_tensors()


def test_weights_of_another_form_hold_no_tensors(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(CtxextError, match=r'"mine" holds its weights as pytorch_model\.bin') as caught:
        Checkpoint("mine", tmp_path, GPT2).stored_tensors()
    assert "save_pretrained" in caught.value.hint


def test_names_in_a_few_words(tmp_path):
    assert grouped(["a.0.w", "a.1.w", "b"]) == "a.*.w × 2, b"
    assert grouped(["a.10.w"]) == "a.*.w"
    assert str(NewTensor("w", tmp_path, "F32", None, (2, 3), iter)) == "w new, 2×3"
