"""A stranger's folder with a canary behind a door of transformers, and a record of what ran or was fetched."""

import os
import shutil
import socket
from pathlib import Path

import pytest
from doors import FAKES

from hand_made import make_tokenizer, tiny_llama

TRAINED = 320


@pytest.fixture(scope="session")
def clean(tmp_path_factory) -> Path:
    """A checkpoint with a tokenizer and nothing else; tests copy it."""
    folder = tmp_path_factory.mktemp("clean") / "clean"
    tiny_llama(max_position_embeddings=TRAINED).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def strangers(clean, tmp_path):
    """A copy of the clean folder with some doors open, under a name of its own: transformers keeps code by names."""

    def make(*doors) -> Path:
        folder = tmp_path / f"{tmp_path.name}-stranger"
        shutil.copytree(clean, folder)
        for door in doors:
            door(folder)
        return folder

    return make


@pytest.fixture
def record(tmp_path, monkeypatch) -> Path:
    """The file in which canaries write, here and in the processes that verification starts.

    Look-ups of names of the network are noted and refused; kernels of the Hub by what transformers asks before
    it loads one.
    """
    import transformers.modeling_utils

    path = tmp_path / "canaries.txt"
    path.write_text("")
    monkeypatch.setenv("CTXEXT_CANARIES", str(path))

    def note(line: str) -> None:
        with path.open("a") as file:
            file.write(f"{line}\n")

    known = socket.getaddrinfo

    def look_up(host, *arguments, **options):
        if host == "127.0.0.1":  # A server of the test.
            return known(host, *arguments, **options)
        note(f"network: {host}")
        raise OSError("There is no network in this test.")

    is_kernel = transformers.modeling_utils.is_kernel

    def noted(name):
        if is_kernel(name):
            note(f"kernel: {name}")
        return is_kernel(name)

    monkeypatch.setattr(transformers.modeling_utils, "is_kernel", noted)

    def answer(question=""):
        note(f"question: {question}")
        return "y"

    monkeypatch.setattr("socket.getaddrinfo", look_up)
    monkeypatch.setattr("builtins.input", answer)
    monkeypatch.setattr("time.sleep", lambda _: None)  # The Hub's client waits before it tries again.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    return path


@pytest.fixture
def watched_processes(real_processes, monkeypatch) -> None:
    """Each process that verification starts is new, looks for a package `kernels` here, and notes what it looks up."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(FAKES), *filter(None, [os.environ.get("PYTHONPATH")])]))
