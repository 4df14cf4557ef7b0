"""The stand-in for an unknown tokenizer: exact texts, the number of tokens that was counted, and cuts before spaces."""

from pydoc_data.topics import topics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxext.data.encoding import Encoder
from ctxext.data.estimated_tokens import EstimatedTokenizer, fit_size


@given(st.text(max_size=200), st.floats(0.3, 40))
def test_tokens_are_the_text(text, size):
    tokenizer = EstimatedTokenizer(size)
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


@given(st.text("ab é\n", max_size=60), st.text("ab é\n", min_size=1, max_size=60), st.floats(0.3, 40))
def test_a_text_may_be_cut_before_a_space(first, second, size):
    tokenizer = EstimatedTokenizer(size)
    first, second = f"{first}a", f" {second}"
    parts = tokenizer([first, second])["input_ids"]
    assert tokenizer(first + second)["input_ids"] == [*parts[0], *parts[1]]


@pytest.mark.parametrize("density", [0.24, 0.3, 0.7])
def test_a_text_has_the_counted_number_of_tokens(density):
    text, other = topics["strings"], topics["class"] + topics["numbers"] + topics["lambda"]
    count = round(density * len(text))
    tokenizer = EstimatedTokenizer(fit_size(text, count))
    assert abs(len(tokenizer(text)["input_ids"]) - count) <= 3
    assert len(tokenizer(other)["input_ids"]) / len(other) == pytest.approx(density, rel=0.06)


def test_fewer_tokens_than_words_cannot_be_reached():
    tokenizer = EstimatedTokenizer(fit_size("one two three", 1))
    assert len(tokenizer("one two three")["input_ids"]) == 3


def test_a_conversation_has_the_tokens_that_the_template_adds():
    encoders = [Encoder(EstimatedTokenizer(overhead=overhead)) for overhead in (0, 25)]
    few, many = (encoder.encode_message("Hello there") for encoder in encoders)
    assert len(many) - len(few) == 25
    with_system = encoders[0].encode_message("Hello there", system="Be brief.")
    assert len(with_system) > len(few)


def test_a_text_of_many_megabytes_is_cut_without_other_tokens(monkeypatch):
    text = " ".join(topics.values())[:60_000]
    encoder = Encoder(EstimatedTokenizer())
    whole = encoder.encode_document(text)
    monkeypatch.setattr("ctxext.data.encoding._AT_ONCE", 5000)
    assert encoder.encode_document(text) == whole
