"""A tokenizer that reaches beyond its model's vocabulary: harmless until a text is written with such a token."""

import pytest

from ctxext.errors import CtxextError
from ctxext.system.loading import guard_vocabulary
from tiny_base import VOCABULARY, load, save_llama


def test_a_token_beyond_the_embeddings_is_refused(tmp_path):
    from transformers import AutoTokenizer

    folder = save_llama(tmp_path / "model")
    model, tokenizer = load(folder), AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<beyond>"])
    guard_vocabulary(model, tokenizer)
    assert model(tokenizer("w2 w3", return_tensors="pt")["input_ids"]).logits.shape[1] == 2
    with pytest.raises(CtxextError, match=rf"gives the token {VOCABULARY}, and the model knows {VOCABULARY}"):
        model(tokenizer("w2 <beyond>", return_tensors="pt")["input_ids"])
