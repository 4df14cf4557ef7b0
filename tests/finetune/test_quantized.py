"""Training on a base in four bits."""

import dataclasses

import pytest
import torch

from ctxext.finetune.base import load_base, open_base
from ctxext.finetune.loss import use_chunked_loss
from ctxext.finetune.prepare import with_adapter
from tiny_base import PARALLEL, TRAINED, make_base


def test_gradients_equal_those_of_the_same_weights_unpacked(tmp_path):
    """bitsandbytes has a kernel without a gradient, and takes it once a model was in eval mode."""
    functional = pytest.importorskip("bitsandbytes.functional")
    base = open_base(str(make_base(tmp_path, hidden_size=64, intermediate_size=64)), 64)  # It packs blocks of 64.
    options = dataclasses.replace(PARALLEL, quantize="4bit").settled(window=128, trained_length=TRAINED)
    packed, plain = (
        load_base(base, chosen, None)[0] for chosen in (options, dataclasses.replace(options, quantize="none"))
    )
    unpacked = dict(plain.named_parameters())
    num_packed = 0
    with torch.no_grad():
        for name, weight in packed.named_parameters():
            if hasattr(weight, "quant_state"):
                num_packed += 1
                unpacked[name].copy_(functional.dequantize_4bit(weight.data, weight.quant_state))
    assert num_packed == 14
    ids = torch.randint(2, 64, (2, 40), generator=torch.Generator().manual_seed(0))
    gradients = []
    for model in (packed, plain):
        use_chunked_loss(model)
        torch.manual_seed(0)
        trained = with_adapter(model, options)
        # Away from zero, where one of the two matrices has no gradient.
        for name, weight in trained.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(weight, std=0.1)
        trained.train()(input_ids=ids, labels=ids).loss.backward()
        gradients.append({name: weight.grad for name, weight in trained.named_parameters() if weight.requires_grad})
    for name, gradient in gradients[0].items():
        assert torch.allclose(gradient, gradients[1][name], atol=1e-4, rtol=1e-3), name
