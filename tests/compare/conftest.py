"""Fixtures: a tiny checkpoint with a tokenizer."""

from pathlib import Path

import pytest

from ctxext.evaluate.report import pictures
from hand_made import make_tokenizer, tiny_llama


@pytest.fixture(scope="session", autouse=True)
def no_pictures():
    """Pictures are laid out and not drawn, as that takes longer than a short comparison."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pictures, "as_png", lambda figure: b"not drawn")
        yield


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Path:
    """A tiny random Llama with its tokenizer, as a folder."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny_llama().save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder
