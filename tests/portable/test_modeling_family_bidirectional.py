"""A decoder that is made bidirectional after it is loaded: relation maps and distance-aware refuse it by name."""

import pytest
import torch

from portable_checkpoints import tokens
from test_modeling_family_padding import RELATIONS, models, vocabulary  # noqa: F401

NAMES = [*RELATIONS, "distance-aware"]


def by_config(model):
    model.config.is_causal = False


def by_modules(model):
    for module in model.modules():
        if hasattr(module, "is_causal"):
            module.is_causal = False


@pytest.mark.parametrize("make", [by_config, by_modules])
@pytest.mark.parametrize("name", NAMES)
def test_it_is_refused_by_name(models, name, make):  # noqa: F811
    model = models("llama", name)
    ids, kept = tokens(60, vocabulary=vocabulary(model)), []
    with torch.no_grad():
        before = model(ids).logits
        kept = [(module, module.is_causal) for module in model.modules() if hasattr(module, "is_causal")]
        make(model)
        try:
            for mask in (None, torch.ones_like(ids)):
                with pytest.raises(ValueError, match=rf"^{name} requires causal attention, but is_causal is False\.$"):
                    model(ids, attention_mask=mask)
        finally:
            vars(model.config).pop("is_causal", None)
            for module, value in kept:
                module.is_causal = value
        assert torch.equal(model(ids).logits, before)


@pytest.mark.parametrize("name", ["self-extend", "distance-aware"])
def test_an_argument_is_refused_too(models, name):  # noqa: F811
    model = models("llama", name)
    with pytest.raises(ValueError, match="requires causal attention"):
        model(tokens(60, vocabulary=vocabulary(model)), is_causal=False)
