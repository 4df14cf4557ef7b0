"""A converted text part also loads through the whole model's class, or is refused by name."""

import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

import tiny_models
from ctxext.errors import CtxextError
from ctxext.recipes import MsPoE
from portable_checkpoints import write

IDS = torch.arange(3, 40)[None]


def whole(model_type, folder):
    """A tiny random model, images and text, as a checkpoint."""
    torch.manual_seed(0)
    config = tiny_models.tiny_config(model_type)
    model = AutoModelForImageTextToText._model_mapping[type(config)]._from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim >= 2:
                weight.normal_(0, 0.3)
    model.save_pretrained(folder)
    return folder


@torch.no_grad()
def logits(kind, folder, **options):
    model = kind.from_pretrained(folder, dtype=torch.float32, **options).eval()
    return model(input_ids=IDS).logits, type(model).__name__


@pytest.mark.parametrize("model_type", ["gemma3", "qwen3_5", "mllama"])
def test_the_whole_model_loads_with_the_method(model_type, tmp_path):
    if model_type not in tiny_models.FAMILIES:
        pytest.skip(f"this transformers has no {model_type}")
    source = whole(model_type, tmp_path / "source")
    stock, name = logits(AutoModelForImageTextToText, source)
    for ratio in (1.0, 4.0):
        folder = tmp_path / f"ratio_{ratio:g}_{model_type}"
        shutil.copytree(source, folder)
        write(folder, MsPoE(head_order="fixed", first_layer=0, ratio_min=ratio, ratio_max=ratio))
        converted, own = logits(AutoModelForImageTextToText, folder, trust_remote_code=True)
        assert own == f"Ctxext{name}"
        assert torch.equal(converted, stock) == (ratio == 1.0)
        assert torch.equal(logits(AutoModelForCausalLM, folder, trust_remote_code=True)[0], converted)
    with pytest.raises((KeyError, ValueError), match="trust_remote_code"):
        AutoModelForImageTextToText.from_pretrained(folder)


def test_llama4_is_refused_by_name(tmp_path):
    source = whole("llama4", tmp_path / "source")
    with pytest.raises(CtxextError, match='"llama4" cannot be converted: its full-attention layers have no position'):
        write(source, MsPoE(head_order="fixed"))
