"""How long a table of positions is, by its configuration, and the buffers that count its rows."""

from pathlib import Path

import pytest

from ctxext.errors import CtxextError
from ctxext.recipes.rotary import model_config
from ctxext.recipes.table import _buffer

BERT = {"model_type": "bert", "max_position_embeddings": 512}
ROBERTA = {"model_type": "roberta", "max_position_embeddings": 514, "pad_token_id": 1}
OPT = {"model_type": "opt", "max_position_embeddings": 2048}
GPT2 = {"model_type": "gpt2", "n_positions": 1024}


@pytest.mark.parametrize(
    ("config", "positions", "special"),
    [
        (BERT, 512, 0),
        (ROBERTA, 512, 2),
        ({**ROBERTA, "pad_token_id": 0}, 513, 1),
        (OPT, 2048, 2),
        (GPT2, 1024, 0),
        ({**BERT, "max_position_embeddings": 2}, 2, 0),
        ({**BERT, "max_position_embeddings": 10**8}, 10**8, 0),
        ({**ROBERTA, "max_position_embeddings": 4}, 2, 2),
    ],
)
def test_how_many_positions(config, positions, special):
    encoding = model_config(dict(config)).encoding
    assert (encoding.trained_length, encoding.context_length, encoding.num_special) == (positions, positions, special)
    assert not encoding.is_scaled
    assert model_config(dict(config), 7).encoding.trained_length == 7
    noted = {**config, "ctxext": {"trained_length": 9}}
    assert model_config(noted).encoding.trained_length == 9


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({**BERT, "max_position_embeddings": 1}, "max_position_embeddings"),
        ({**BERT, "max_position_embeddings": 10**8 + 1}, "max_position_embeddings"),
        ({**BERT, "max_position_embeddings": True}, "max_position_embeddings"),
        ({**BERT, "max_position_embeddings": "512"}, "max_position_embeddings"),
        ({"model_type": "bert"}, "max_position_embeddings"),
        ({**ROBERTA, "max_position_embeddings": 3}, "max_position_embeddings"),
        ({**ROBERTA, "pad_token_id": -1}, "pad_token_id"),
        ({**ROBERTA, "pad_token_id": True}, "pad_token_id"),
        ({**ROBERTA, "pad_token_id": "1"}, "pad_token_id"),
        ({"model_type": "whisper"}, "was not tried"),
    ],
)
def test_configurations_that_do_not_say(config, told):
    with pytest.raises(CtxextError, match=told):
        model_config(dict(config))


def test_the_length_is_stated_wherever_it_was():
    model = model_config({**GPT2, "n_ctx": 1024}).with_context_length(4096)
    assert {key: model.config[key] for key in ("n_positions", "n_ctx")} == {"n_positions": 4096, "n_ctx": 4096}
    assert "n_ctx" not in model_config(dict(GPT2)).with_context_length(4096).config
    assert model_config(dict(ROBERTA)).with_context_length(1024).config["max_position_embeddings"] == 1026
    assert model_config(dict(OPT)).with_context_length(4096).config["max_position_embeddings"] == 4096


@pytest.mark.parametrize(("dtype", "size"), [("I64", 8), ("I32", 4)])
@pytest.mark.parametrize("shape", [[3], [1, 3]])
def test_buffers_count_on(dtype, size, shape):
    for name, wanted in (("embeddings.position_ids", [0, 1, 2, 3, 4]), ("embeddings.token_type_ids", [0] * 5)):
        tensor = _buffer(Path("x"), {"shape": shape, "dtype": dtype}, name, 3, 5)
        assert tensor.shape == (*shape[:-1], 5)
        content = b"".join(tensor.pieces(memoryview(b"")))
        assert [int.from_bytes(content[at : at + size], "little") for at in range(0, len(content), size)] == wanted


@pytest.mark.parametrize("entry", [([4], "I64"), ([2, 3], "I64"), ([3, 1], "I64"), ([], "I64"), ([3], "F32")])
def test_buffers_of_another_form_are_refused(entry):
    with pytest.raises(CtxextError, match="expected one whole number for each of 3 rows"):
        _buffer(Path("x"), {"shape": entry[0], "dtype": entry[1]}, "position_ids", 3, 5)
