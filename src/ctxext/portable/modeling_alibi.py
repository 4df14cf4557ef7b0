"""A private copy of a family's modeling module with ALiBi slopes that depend on the query position.

This file is copied into checkpoints. The checkpoint's `modeling_ctxext.py` names the family and the method, which
computes the factors on the slopes of each query from its settings, `ctxext_code` in config.json. A query's bias depends
only on its position, so the result is the same in one call, in chunks, with a cache or padded. Attention and the rest
of the model are the family's. Shapes: b batch, h heads, l queries, k keys.
"""

import functools
import threading

import torch
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

from .private_copy import (
    arguments_of,
    cache_in,
    check_arguments,
    classes_of,
    find_renamed_weights,
    is_model,
    private_copy,
    replace,
    true_values,
)

KEY = "ctxext_code"
BUILDERS = ("build_alibi_tensor", "build_mpt_alibi_tensor")  # The function that builds the bias, by family.
CURRENT = threading.local()  # `shares`: factors on the slopes in the forward that this thread is in.


class RowBias:
    """Bias of a family (b or 1, h, 1, k) times the factor of each query (b or 1, h, l, 1).

    It replaces the family's tensor and has its shape. It is expanded to all queries only within the operation that
    adds it to the scores, so that no tensor of that size is kept.
    """

    def __init__(self, bias, shares, shape):
        self.bias, self.shares, self.shape = bias, shares, shape

    def expand_queries(self):
        """Return the bias of every query position (b or 1, h, l, k)."""
        return (self.bias * self.shares).to(self.bias.dtype)

    def to(self, *args, **kwargs):
        """Return the same bias on another device, for device maps."""
        return RowBias(self.bias.to(*args, **kwargs), self.shares.to(*args, **kwargs), self.shape)

    def baddbmm(self, *args, **kwargs):
        """Return scores (b * h, l, k): products with the bias added (BLOOM)."""
        return self.expand_queries().flatten(0, 1).baddbmm(*args, **kwargs)

    def size(self, axis):
        """Return the length of an axis (MPT)."""
        return self.shape[axis]

    def __getitem__(self, places):
        """Return the bias of the last keys; the family builds it for the longest text (MPT)."""
        return RowBias(self.bias[..., places[-1]], self.shares, self.shape)

    def __radd__(self, scores):
        """Return scores (b, h, l, k) with the bias added (MPT)."""
        return scores + self.expand_queries()

    def reshape(self, *shape):
        """Return self: batch and heads, which the family splits here, are already separate axes (Falcon)."""
        return self

    def __truediv__(self, number):
        """Return the bias (b, h, l, k) divided by a number, which becomes part of the mask (Falcon)."""
        return self.expand_queries() / number

    def view(self, *shape):
        """Return the bias (b, h, l, k) for eager attention (Falcon)."""
        return self.expand_queries()


def build_bias(original, *args, **kwargs):
    """Return the family's bias times the factors of this forward."""
    bias, shares = original(*args, **kwargs), getattr(CURRENT, "shares", None)
    if shares is None:
        return bias
    by_head = bias.reshape(-1, shares.shape[1], 1, bias.shape[-1])
    if shares.shape[0] == shares.shape[2] == 1:  # One query, or equal factors for all queries.
        return (by_head * shares).to(bias.dtype).reshape(bias.shape)
    return RowBias(by_head, shares, bias.shape)


def positions_of(mask, seen, length, device):
    """Return the query positions (b or 1, l) by a mask: of tokens (b, k), of pairs (b, 1, l, k), or None."""
    columns = torch.arange(length, device=device) + seen
    if mask is None:
        return columns[None]
    if mask.ndim == 4:  # Hidden keys are marked by True, or by a number below 0.
        return (mask == 0).sum(-1)[:, 0] - 1
    return (mask.to(device).cumsum(-1) - 1)[:, columns]


def model_forward(names, needs_mask, original, model, *args, **kwargs):
    """Run the family's model with the factors on the slopes of each query."""
    given, slopes = dict(zip(names, args, strict=False)) | kwargs, model.ctxext_slopes
    inputs = next((given[name] for name in ("input_ids", "inputs_embeds") if given.get(name) is not None), None)
    if slopes is None or inputs is None:
        return original(model, *args, **kwargs)
    cache, mask, length = cache_in(given), given.get("attention_mask"), inputs.shape[1]
    seen = 0 if cache is None else cache.get_seq_length()
    if slopes.leaves_alone(seen + length):
        return original(model, *args, **kwargs)
    shares = slopes.shares(positions_of(mask, seen, length, inputs.device))
    if mask is None and needs_mask:
        keys = length if cache is None else cache.get_mask_sizes(length, 0)[0]
        given["attention_mask"] = torch.ones(len(inputs), keys, dtype=torch.long, device=inputs.device)
    outer, CURRENT.shares = getattr(CURRENT, "shares", None), shares
    try:
        return original(model, **given)
    finally:
        CURRENT.shares = outer


def model_init(method, original, model, config, *args, **kwargs):
    """Build the family's model with the values that config.json hides, and set its slopes."""
    settings = getattr(config, KEY, None)
    with true_values(config, settings):
        original(model, config, *args, **kwargs)
    model.ctxext_slopes = method(settings["steps"][0]) if settings else None
    if settings and len(model.ctxext_slopes.exponents) != config.num_attention_heads:
        raise ValueError(f"config.json has exponents for {len(model.ctxext_slopes.exponents)} heads.")
    find_renamed_weights(model)


def family(stub, modeling, methods):
    """Return a private copy of the family's modeling module for the checkpoint module named `stub`.

    `methods` is a list of one class.
    """
    module, (method,) = private_copy(stub, modeling), methods
    builder = next(name for name in BUILDERS if hasattr(module, name))
    setattr(module, builder, functools.partial(build_bias, getattr(module, builder)))
    needs_mask = hasattr(module, "_get_alibi_slopes")  # BLOOM of transformers 5 creates a mask if it has none.
    for cls in classes_of(module):
        if is_model(cls):
            replace(cls, "__init__", functools.partial(model_init, method))
        if cls.__name__ in MODEL_MAPPING_NAMES.values():
            check_arguments(cls, "attention_mask")
            replace(cls, "forward", functools.partial(model_forward, arguments_of(cls), needs_mask))
    return module
