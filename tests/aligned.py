"""Weights at like addresses, so that equal models give equal bits."""

from typing import Any

import torch


def aligned(model: Any) -> Any:
    """Give every weight memory of its own.

    Safetensors maps a file, so a tensor lies wherever the length of the file's header puts it, and MKL adds up the
    product of a matrix and a vector in an order that depends on the address. Where two files have headers of different
    lengths, equal weights would give logits that differ in the last bit, on some processors.
    """
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
    return model
