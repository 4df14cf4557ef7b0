"""The number of prompts that run at once."""

import os
from typing import Any

import torch

_MAX_ROWS = 32
_SHARE = 0.4
_STATES = 16
"""A generous estimate of the activations of a layer, in hidden states per token."""


def rows_that_fit(model: Any, length: int) -> int:
    """How many prompts of a length fit into memory together.

    The estimate uses the total memory of the machine, not the free memory, so that batches are reproducible.
    """
    config = model.config.get_text_config(decoder=True)
    size = model.dtype.itemsize
    hidden = int(getattr(config, "hidden_size", 4096))
    heads = int(getattr(config, "num_attention_heads", 32))
    num_kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    head_dim = int(getattr(config, "head_dim", None) or hidden // heads)
    layers = int(getattr(config, "num_hidden_layers", 32))
    wide = int(getattr(config, "intermediate_size", None) or 4 * hidden)
    per_token = size * (2 * layers * num_kv_heads * head_dim + _STATES * hidden + 3 * wide)
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    room = _SHARE * (_memory(model.device) - weights)
    return int(min(_MAX_ROWS, max(1, room // (per_token * length))))


def _memory(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
