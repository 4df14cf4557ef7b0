"""Fixtures: a tiny checkpoint with a tokenizer, and models made by hand."""

from pathlib import Path

import pytest
from tokenizers import processors

from ctxext.report import pictures as report_pictures
from hand_made import make_tokenizer, tiny_llama

AS_PNG = report_pictures.as_png


@pytest.fixture(scope="session", autouse=True)
def no_pictures():
    """Pictures are laid out and not drawn (fixture `pictures`), as that takes longer than a short evaluation."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report_pictures, "as_png", lambda figure, **_: b"not drawn")
        yield


@pytest.fixture
def pictures(monkeypatch):
    """Pictures are drawn."""
    monkeypatch.setattr(report_pictures, "as_png", AS_PNG)


@pytest.fixture(scope="session")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="session")
def words():
    """A tokenizer as encoders have one: with a mask, and an end behind every text."""
    fast = make_tokenizer()
    fast.add_special_tokens({"mask_token": "<mask>", "pad_token": "<pad>", "cls_token": "<s>", "sep_token": "</s>"})
    fast.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    return fast


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory, tokenizer) -> Path:
    """A tiny random Llama with its tokenizer, as a folder."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny_llama().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
