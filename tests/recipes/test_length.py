"""Lengths as people write them."""

import pytest

from ctxext.errors import CtxextError
from ctxext.recipes.length import format_length, parse_length

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
    with pytest.raises(CtxextError, match="more than any context has"):
        parse_length(text)
    assert parse_length("10000000000") == 10**10


@pytest.mark.parametrize("method", ["pi", "dynamic", "self-extend"])
@pytest.mark.parametrize("factor", [1e30, 1e9])
def test_a_recipe_that_reaches_further(method, factor, run, llama):
    result = run("convert", llama, "-m", method, f"--factor={factor}", "--dry-run")
    assert "tokens are more than any context has" in result.exception.message


@pytest.mark.parametrize(
    ("tokens", "text"), [(1, "1"), (1023, "1023"), (1024, "1k"), (1536, "1536"), (2**20, "1M"), (2**20 + 1024, "1025k")]
)
def test_written(tokens, text):
    assert format_length(tokens) == text
