"""How long a table of positions is, by its configuration, and the buffers that count its rows."""

from pathlib import Path

import pytest

from ctxext.checkpoint.families import family_of
from ctxext.errors import CtxextError
from ctxext.recipes.encodings.learned import tensors_named
from ctxext.recipes.methods.table import Table, _buffer
from ctxext.recipes.model_config import model_config

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
        ({"model_type": "camembert", "max_position_embeddings": 514}, 512, 2),
        ({"model_type": "bart", "max_position_embeddings": 1024}, 1024, 2),
        ({"model_type": "mbart", "max_position_embeddings": 1024}, 1024, 2),
        ({"model_type": "biogpt", "max_position_embeddings": 1024}, 1024, 2),
        ({"model_type": "led", "max_encoder_position_embeddings": 16384}, 16384, 0),
        ({"model_type": "marian", "max_position_embeddings": 512}, 512, 0),
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
    ("config", "message"),
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
        ({"model_type": "whisper"}, "location of its table is unknown"),
    ],
)
def test_configurations_without_a_length_are_refused(config, message):
    with pytest.raises(CtxextError, match=message):
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


@pytest.mark.parametrize(
    ("config", "first", "said"),
    [
        (BERT, 0, "a table with one row for each of 512 positions, all of them trained"),
        (ROBERTA, 2, "a table with one row for each of 512 positions after 2 for others, all of them trained"),
        (OPT, 0, "one row for each of 2048 positions after 2 for others, all of them trained"),
        ({**BERT, "position_embedding_type": "absolute"}, 0, "one row for each of 512 positions, all of them trained"),
        (
            {**BERT, "position_embedding_type": "relative_key"},
            0,
            "embeddings of distances, clipped at 511: all farther",
        ),
        ({"model_type": "marian", "max_position_embeddings": 512}, 0, "sinusoidal position embeddings: a table comp"),
    ],
)
def test_the_summary_of_a_table(config, first, said):
    """`position_ids` count the rows for others where the keys of config.json do."""
    encoding = model_config(dict(config)).encoding
    assert said in encoding.describe()
    assert (encoding.first_index, encoding.feature) == (first, "table")


def test_which_weights_a_training_trains_too():
    assert model_config(dict(GPT2)).encoding.learned_tensors == ("wpe.weight",)
    assert model_config({"model_type": "marian", "max_position_embeddings": 512}).encoding.learned_tensors == ()


def test_names_of_tensors_end_with_whole_parts():
    names = ["wpe.weight", "transformer.wpe.weight", "xwpe.weight", "wpe.weight.x"]
    assert tensors_named(names, "wpe.weight") == ["wpe.weight", "transformer.wpe.weight"]


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({**BERT, "position_embedding_type": "relative_key"}, "its table contains distances"),
        ({"model_type": "whisper"}, "the location of its table is unknown"),
    ],
)
def test_tables_that_cannot_be_written(config, reason):
    assert Table.refusal(dict(config), family_of(config)).startswith(reason)


def test_a_model_without_a_table_is_not_edited():
    llama = {"model_type": "llama", "hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 128}
    with pytest.raises(CtxextError, match='"llama" has no table that table supports: it has rotary') as caught:
        Table(factor=2).edit(model_config(llama))
    assert "ctxext inspect" in caught.value.hint
    assert Table(factor=2).edit(model_config(dict(BERT))).config["max_position_embeddings"] == 1024
