"""Shared fixtures: a small Llama checkpoint on disk, and the command line run in this process."""

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

os.environ.setdefault("HF_HUB_OFFLINE", "1")


def make_llama(folder: Path, *, seed: int = 0, **changes) -> Path:
    """Save a random Llama with a tokenizer's configuration, as a user's checkpoint would look."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 64,
        "max_position_embeddings": 128,
        "initializer_range": 0.3,
    }
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**{**settings, **changes}))
    model.save_pretrained(folder)
    window = model.config.max_position_embeddings
    (folder / "tokenizer_config.json").write_text(
        f'{{"tokenizer_class":   "PreTrainedTokenizerFast",\n "model_max_length": {window}, "note": "é"}}'
    )
    (folder / "special_tokens_map.json").write_text("{}")
    (folder / "README.md").write_text("---\nlicense: mit\nlanguage: [en]\ntags: [tiny]\n---\n# Tiny\n")
    return folder


@pytest.fixture(scope="session")
def llama_source(tmp_path_factory) -> Path:
    """A Llama checkpoint that no test may change."""
    return make_llama(tmp_path_factory.mktemp("source") / "llama")


@pytest.fixture
def llama(tmp_path) -> Path:
    """A Llama checkpoint of the test's own."""
    return make_llama(tmp_path / "llama")


@pytest.fixture
def run():
    """Run a command line in this process; errors come back as the user sees them."""
    from ctxext.cli.app import app
    from ctxext.errors import CtxextError

    def call(*words: object):
        result = CliRunner().invoke(app, [str(word) for word in words])
        if isinstance(result.exception, CtxextError):
            result.exit_code = 1
        elif result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return call


def read_json(path: Path) -> dict:
    return json.loads(path.read_text())
