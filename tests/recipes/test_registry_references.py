"""No method arrives untested: each has a reference from its paper, and changes nothing at its neutral numbers."""

import json
from types import SimpleNamespace

import pytest
import torch
import transformers

import tiny_encodings
from ctxext.api import METHODS, Recipe, convert
from ctxext.checkpoint.auto_class import auto_class
from ctxext.errors import CtxextError
from ctxext.recipes.model_config import model_config
from ctxext.verify.rotation import reference_of
from loaded_models import load, logits

FUNCTIONS = {
    "table": ("rows", "original"),
    "base": ("base",),
    "schedule": ("schedule",),
    "heads": ("choose", "rotation"),
    "attention": ("relation", "temperature"),
    "slopes": ("slopes",),
    "buckets": ("bucket",),
    "memory": ("states",),
    "length": (),
}


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_every_method_has_a_reference(method):
    assert all(hasattr(reference_of(method), function) for function in FUNCTIONS[method.kind])


def test_a_method_without_one_is_named():
    with pytest.raises(CtxextError, match=r'"nobody-wrote-this-one-down" has no reference'):
        reference_of(SimpleNamespace(name="nobody-wrote-this-one-down"))


def logits_of(folder) -> torch.Tensor:
    model = load(folder, getattr(transformers, auto_class(json.loads((folder / "config.json").read_text()))))
    ids = torch.arange(60)[None] % 36 + 3
    return logits(model, ids, **({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}))


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_neutral_numbers_change_nothing(method, llama_source, tmp_path):
    source = tiny_encodings.source_for(method.encoding, llama_source, tmp_path / "source")
    encoding = model_config(json.loads((source / "config.json").read_text())).encoding
    convert(str(source), tmp_path / "out", Recipe([method.neutral_step(encoding)]), check=False)
    assert torch.equal(logits_of(tmp_path / "out"), logits_of(source))
