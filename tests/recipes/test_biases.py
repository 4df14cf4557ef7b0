"""Encodings that are biases: what config.json says of ALiBi's slopes and T5's buckets, and what bounds the others."""

import pytest

from ctxext.checkpoint.families import FAMILIES, family_of
from ctxext.errors import CtxextError
from ctxext.recipes.methods.ntk_alibi import NtkAlibi
from ctxext.recipes.model_config import model_config

BLOOM = {"model_type": "bloom", "seq_length": 64, "n_head": 4}
MPT = {"model_type": "mpt", "max_seq_len": 64, "n_heads": 4}
T5 = {"model_type": "t5", "n_positions": 64}


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (BLOOM, "seq_length"),
        (BLOOM, "n_head"),
        (MPT, "max_seq_len"),
        (T5, "n_positions"),
        (T5, "relative_attention_max_distance"),
        (T5, "relative_attention_num_buckets"),
    ],
)
def test_sizes_are_whole_numbers_from_1_to_2_to_the_31(config, key):
    for value in (1, 2**31):
        model_config({**config, key: value})
    for value in (0, 2**31 + 1, 7.0, "7", True, None):
        with pytest.raises(CtxextError, match=f'no usable {key}: "{value}"'):
            model_config({**config, key: value})


def test_alibi_in_words():
    said = "ALiBi: 4 slopes, by which scores fall with the distance; no position beyond 64 is out of range{}, but far "
    said += "tokens fade"
    assert model_config(BLOOM).encoding.describe() == said.format("")
    assert model_config(MPT).encoding.describe() == said.format(
        ", although transformers does not support longer inputs"
    )


@pytest.mark.parametrize(
    ("attention", "said"),
    [
        (None, None),
        ("x", None),
        ({}, None),
        ({"alibi_bias_max": 8}, None),
        ({"alibi_bias_max": "16"}, None),
        ({"alibi_bias_max": 16}, "16"),
        ({"alibi_bias_max": 8.5}, "8.5"),
    ],
)
def test_slopes_that_transformers_does_not_read(attention, said):
    config = {**MPT, **({} if attention is None else {"attn_config": attention})}
    model = model_config(config)
    cautions = model.encoding.cautions(config, model.family, is_changed=True)
    told = (
        f'config.json contains alibi_bias_max "{said}", which transformers ignores: it uses the slopes of 8, '
        "which the method changes."
    )
    assert cautions == ((told,) if said else ())


def test_buckets_are_restored_and_written():
    model = model_config({**T5, "relative_attention_max_distance": 40})
    assert model.encoding.to_record() == {"trained_length": 64, "source_length": 64, "source_distance": 40}
    assert model.encoding.restore_source({"source_distance": 20}).distance == 20
    assert model.encoding.restore_source({}).distance == 40
    assert model.encoding.at_length(256).restore_source({"source_length": 96}).context_length == 96
    longer = model.with_context_length(128).config
    assert (longer["n_positions"], longer["relative_attention_max_distance"]) == (128, 40)


@pytest.mark.parametrize("rows", ["row-wise", "static"])
def test_settings_and_summary_of_ntk_alibi(rows):
    step, model = NtkAlibi(factor=4, rows=rows), model_config(BLOOM)
    factor = {"row-wise": None, "static": 4}[rows]
    assert step.settings(model) == {"original_length": 64, "factor": factor, "exponents": [0, 1 / 3, 2 / 3, 1]}
    assert ("every input changes" in step.caution_for(model)) == (rows == "static")
    assert ("stay unchanged" in step.caution_for(model)) == (rows == "row-wise")


def test_alibi_is_read_for_the_tested_families():
    for name in ("bloom", "mpt"):
        assert NtkAlibi.refusal({"model_type": name}, FAMILIES[name]) == ""
    falcon = {"model_type": "falcon", "alibi": True, "num_attention_heads": 4}
    assert NtkAlibi.refusal(falcon, family_of(falcon)) == ""
    other = type(FAMILIES["bloom"])(model_type="new", positions="alibi")
    assert NtkAlibi.refusal({"model_type": "new", "num_hidden_layers": 2}, other) == "its biases are untested"
