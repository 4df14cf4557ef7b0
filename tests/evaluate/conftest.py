"""Fixtures: a tiny checkpoint with a tokenizer, and models made by hand."""

from pathlib import Path

import pytest
import torch

from hand_made import Oracle, make_tokenizer, tiny_config, tiny_llama


@pytest.fixture(scope="session")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory, tokenizer) -> Path:
    """A tiny random Llama with its tokenizer, as a folder."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny_llama().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def oracle(tokenizer):
    """A maker of such models; `sees` tells from a depth whether the model finds a needle there."""

    def make(sees):
        torch.manual_seed(0)
        return Oracle(tiny_config(max_position_embeddings=2048)).eval().prepare(tokenizer, sees)

    return make
