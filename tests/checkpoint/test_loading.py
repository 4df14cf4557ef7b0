"""Loading of models: devices, silence, kernels, and tokens without an embedding."""

import itertools
import sys
import types
from contextlib import nullcontext
from importlib.machinery import ModuleSpec

import pytest
import torch
from transformers import AutoTokenizer
from transformers.integrations import hub_kernels
from transformers.utils import logging

from ctxext.checkpoint import loading
from ctxext.errors import CtxextError
from tiny_base import VOCABULARY, load, save_llama


@pytest.mark.parametrize(("rank", "count", "index"), [(None, 1, 0), ("0", 2, 0), ("1", 2, 1), ("5", 4, 1), ("7", 4, 3)])
def test_each_process_of_a_machine_has_its_own_device(monkeypatch, rank, count, index):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("LOCAL_RANK", rank)
    assert loading.choose_device("auto") == torch.device("cuda", index)
    assert loading.choose_device("cpu") == torch.device("cpu")


def test_a_device_that_is_not_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert loading.choose_device("auto") == torch.device("cpu")
    for name in ("cuda", "cuda:1", "mps"):
        with pytest.raises(CtxextError, match=f'torch finds no device "{name}"'):
            loading.choose_device(name)
    with pytest.raises(CtxextError, match='"gpu" is not a device'):
        loading.choose_device("gpu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("device", ["cuda", "mps", "meta"])
def test_only_a_cpu_changes_what_was_saved(device, dtype):
    model = types.SimpleNamespace(dtype=dtype)
    assert loading.settle_dtype(model, "auto", torch.device(device)) is model


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("level", [logging.INFO, logging.ERROR])
@pytest.mark.parametrize("shows_bars", [False, True])
def test_transformers_is_as_loud_afterwards_as_it_was_before(level, shows_bars, fails):
    before, shown = logging.get_verbosity(), logging.is_progress_bar_enabled()
    try:
        logging.set_verbosity(level)
        (logging.enable_progress_bar if shows_bars else logging.disable_progress_bar)()
        outcome = pytest.raises(CtxextError, match=r"^It fails: why$") if fails else nullcontext()
        with outcome, loading.explain_loading_errors("It fails", "hint"):
            assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == (logging.ERROR, False)
            if fails:
                raise ValueError("why\nand more")
        assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == (level, shows_bars)
    finally:
        logging.set_verbosity(before)
        (logging.enable_progress_bar if shown else logging.disable_progress_bar)()


@pytest.mark.parametrize("fails", [False, True])
def test_kernels_of_the_hub_are_not_there_while_something_loads_and_are_again_afterwards(monkeypatch, fails):
    kernels = types.ModuleType("kernels")
    kernels.__spec__, kernels.get_kernel = ModuleSpec("kernels", None), lambda *_: "theirs"
    monkeypatch.setitem(sys.modules, "kernels", kernels)
    monkeypatch.setattr(hub_kernels, "get_kernel", lambda *_: "hub", raising=False)
    places = [(kernels, "theirs"), (hub_kernels, "hub")]
    try:
        with loading.forbid_downloads():
            for place, _ in places:
                with pytest.raises(ImportError, match='"them/kernel" is not downloaded'):
                    place.get_kernel("them/kernel", revision="x")
            if fails:
                raise KeyError
    except KeyError:
        assert fails
    assert [place.get_kernel() for place, _ in places] == [name for _, name in places]


class Ids:
    """Token ids on a device that this machine does not have."""

    def __init__(self, numbers, device):
        self.numbers, self.device = numbers, types.SimpleNamespace(type=device)

    def numel(self):
        return self.numbers.numel()

    def max(self):
        return self.numbers.max()

    def __getitem__(self, at):
        return Ids(self.numbers[at], self.device.type)


@pytest.mark.parametrize("vocabulary", [8, 9, 10, 11])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_tokens_without_an_embedding_are_refused_in_any_row(device, vocabulary):
    """With ten embeddings, an accelerator is checked only if the vocabulary exceeds them."""
    hooks = []
    embedding = types.SimpleNamespace(num_embeddings=10, register_forward_pre_hook=hooks.append)
    model = types.SimpleNamespace(get_input_embeddings=lambda: embedding)
    tokenizer = types.SimpleNamespace(get_vocab=lambda: {str(number): number for number in range(vocabulary)})
    loading.guard_vocabulary(model, tokenizer)
    (check,) = hooks
    for rows in itertools.product((0, 9, 10, 11), repeat=2):
        given = Ids(torch.tensor([[0, row, 1] for row in rows]), device)
        refused = max(rows) >= 10 and (device == "cpu" or vocabulary > 10)
        if refused:
            with pytest.raises(CtxextError, match=f"returned the token {max(rows)}, but the model has 10 embeddings"):
                check(None, (given,))
        else:
            check(None, (given,))
    check(None, ())
    check(None, (Ids(torch.zeros(0, dtype=torch.long), device),))


def test_models_without_embeddings_are_left_alone():
    def none():
        raise NotImplementedError

    for get in (none, lambda: None, lambda: types.SimpleNamespace()):
        loading.guard_vocabulary(types.SimpleNamespace(get_input_embeddings=get), None)


def test_a_token_beyond_the_embeddings_is_refused(tmp_path):
    """Harmless until a text contains such a token."""
    folder = save_llama(tmp_path / "model")
    model, tokenizer = load(folder), AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<beyond>"])
    loading.guard_vocabulary(model, tokenizer)
    assert model(tokenizer("w2 w3", return_tensors="pt")["input_ids"]).logits.shape[1] == 2
    with pytest.raises(
        CtxextError, match=rf"returned the token {VOCABULARY}, but the model has {VOCABULARY} embeddings"
    ):
        model(tokenizer("w2 <beyond>", return_tensors="pt")["input_ids"])
