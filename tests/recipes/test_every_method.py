"""No method arrives untested: each has a reference from its paper, and changes nothing at its neutral numbers."""

import json

import pytest
import torch
import transformers

import tiny_encodings
from ctxext.checkpoint.auto_class import auto_class
from ctxext.converters import convert
from ctxext.errors import CtxextError
from ctxext.recipes import METHODS, PositionInterpolation, Recipe
from ctxext.recipes.encodings.rotary import model_config
from ctxext.verify.reference import reference_of

FUNCTIONS = {
    "table": ("rows", "original"),
    "base": ("base",),
    "schedule": ("schedule",),
    "heads": ("choose", "rotation"),
    "attention": ("relation", "temperature"),
    "slopes": ("slopes",),
    "buckets": ("bucket",),
}


def without_reference(methods) -> list[str]:
    """The names of methods that nothing says the truth about."""
    missing = []
    for method in methods:
        try:
            reference = reference_of(method)
        except CtxextError:
            missing.append(method.name)
            continue
        missing += [method.name for function in FUNCTIONS[method.kind] if not hasattr(reference, function)]
    return missing


def test_every_method_has_a_reference():
    assert without_reference(METHODS) == []


def test_a_method_without_one_is_named():
    class Resonance(PositionInterpolation):
        name = "nobody-wrote-this-one-down"

    try:
        assert without_reference([*METHODS, Resonance]) == ["nobody-wrote-this-one-down"]
        with pytest.raises(CtxextError, match="nobody-wrote-this-one-down"):
            reference_of(Resonance)
    finally:
        del Resonance
        import gc

        gc.collect()


def logits(folder) -> torch.Tensor:
    auto = getattr(transformers, auto_class(json.loads((folder / "config.json").read_text())))
    model = auto.from_pretrained(folder, dtype=torch.float32, trust_remote_code=True).eval()
    ids = torch.arange(60)[None] % 36 + 3
    with torch.no_grad():
        return model(ids, **({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {})).logits


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_neutral_numbers_change_nothing(method, llama_source, tmp_path):
    source = tiny_encodings.source_for(method.encoding, llama_source, tmp_path / "source")
    encoding = model_config(json.loads((source / "config.json").read_text())).encoding
    convert(str(source), tmp_path / "out", Recipe([method.neutral_step(encoding)]), check=False)
    assert torch.equal(logits(tmp_path / "out"), logits(source))
