"""Lengths as people write them."""

import pytest

from ctxext.api import Recipe
from ctxext.errors import CtxextError
from ctxext.files.length import LONGEST, format_length, parse_length
from ctxext.recipes.model_config import model_config
from ctxext.recipes.recipe import step_from_dict

WRITTEN = {"1": 1, "32768": 32768, " 32k ": 32768, "128K": 131072, "1M": 1048576, "2m": 2097152, "1.5k": 1536}


@pytest.mark.parametrize("text", WRITTEN)
def test_read(text):
    assert parse_length(text) == WRITTEN[text]


@pytest.mark.parametrize("text", ["", "0", "0k", "-1", "1.5", "0.3k", "k", "1kk", "1 2", "1e5", "1g", "٣"])
def test_refused(text):
    with pytest.raises(CtxextError, match="not a length"):
        parse_length(text)


@pytest.mark.parametrize("text", ["9" * 400, "9" * 400 + "M", "10000000001", "9999999M"])
def test_longer_than_any_context(text):
    with pytest.raises(CtxextError, match="tokens are above the limit") as caught:
        parse_length(text)
    assert caught.value.hint == f"Use at most {LONGEST}."
    assert parse_length("10000000000") == 10**10 == LONGEST


@pytest.mark.parametrize(
    ("tokens", "text"), [(1, "1"), (1023, "1023"), (1024, "1k"), (1536, "1536"), (2**20, "1M"), (2**20 + 1024, "1025k")]
)
def test_written(tokens, text):
    assert format_length(tokens) == text


@pytest.mark.parametrize("method", ["pi", "ntk", "dynamic", "rerope", "self-extend"])
def test_a_recipe_ends_at_the_longest_context(method):
    llama = {"model_type": "llama", "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1}
    model = model_config({**llama, "max_position_embeddings": 128})
    longest = Recipe([step_from_dict({"method": method, "factor": LONGEST / 128}, "x")])
    assert longest.resolve(model).edit(model).encoding.usable_length == LONGEST
    for factor in (LONGEST / 128 + 1, 1e30):
        longer = Recipe([step_from_dict({"method": method, "factor": factor}, "x")])
        for make in (longer.edit,) if method == "dynamic" else (longer.edit, longer.resolve):
            with pytest.raises(CtxextError, match="above the limit"):
                make(model)
