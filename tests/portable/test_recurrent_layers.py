"""A family that runs one layer at several depths: each depth is a layer of its own to a method."""

import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import tiny_models
from portable_checkpoints import convert, load, tokens

pytestmark = pytest.mark.skipif("hrm_text" not in CONFIG_MAPPING, reason="transformers 4.57 does not know the family")


@torch.no_grad()
def test_the_last_depth_alone_takes_part(tmp_path):
    """A cache is filled depth by depth: keys of all depths before the last are the source's bit for bit."""
    source = tiny_models.save("hrm_text", tmp_path / "source")
    stock = load(source)
    count = stock.config.num_hidden_layers
    assert count > stock.config.num_layers_per_stack
    options = {"ratio_min": 2.0, "ratio_max": 4.0, "head_order": "fixed"}
    changed = load(convert(source, tmp_path / "out", first_layer=count - 1, **options))
    ids = tokens(40)
    own, theirs = (model(ids, use_cache=True).past_key_values for model in (stock, changed))
    same = [torch.equal(own.layers[i].keys, theirs.layers[i].keys) for i in range(count)]
    assert same == [True] * (count - 1) + [False]
