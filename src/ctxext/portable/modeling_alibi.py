"""A private copy of a family's modeling module with ALiBi slopes that depend on the row that reads.

This file travels inside checkpoints and knows no slopes: a stub beside it names the family and the method, which gives
the factors on the slopes of each row; config.json holds its numbers in `ctxext_code`. A row's bias depends on the row
alone, so the result is the same in one call, in chunks, with a cache or padded. Attention and everything else are the
family's. Shapes: b batch, h heads, l rows, k keys.
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
    """A family's bias (b or 1, h, 1, k) times the share of each row (b or 1, h, l, 1).

    It replaces the family's tensor and has its shape. It is expanded to one row per query only within the operation
    that adds it to the scores: nothing of that size is kept.
    """

    def __init__(self, bias, shares, shape):
        self.bias, self.shares, self.shape = bias, shares, shape

    def full(self):
        """The bias of every row (b or 1, h, l, k)."""
        return (self.bias * self.shares).to(self.bias.dtype)

    def to(self, *args, **kwargs):
        """The same on another device, for device maps."""
        return RowBias(self.bias.to(*args, **kwargs), self.shares.to(*args, **kwargs), self.shape)

    def baddbmm(self, *args, **kwargs):
        """BLOOM: scores (b * h, l, k), which are products with the bias added."""
        return self.full().flatten(0, 1).baddbmm(*args, **kwargs)

    def size(self, axis):
        """MPT: the length of an axis."""
        return self.shape[axis]

    def __getitem__(self, places):
        """MPT: the last keys of a bias for the longest text."""
        return RowBias(self.bias[..., places[-1]], self.shares, self.shape)

    def __radd__(self, scores):
        """MPT: scores (b, h, l, k) with the bias added."""
        return scores + self.full()

    def reshape(self, *shape):
        """Falcon: split batch and heads, which are separate already."""
        return self

    def __truediv__(self, number):
        """Falcon: the bias (b, h, l, k) that becomes part of the mask."""
        return self.full() / number

    def view(self, *shape):
        """Falcon's eager attention: the bias (b, h, l, k)."""
        return self.full()


def built(original, *args, **kwargs):
    """The family's bias times the factors of this forward."""
    bias, shares = original(*args, **kwargs), getattr(CURRENT, "shares", None)
    if shares is None:
        return bias
    by_head = bias.reshape(-1, shares.shape[1], 1, bias.shape[-1])
    if shares.shape[0] == shares.shape[2] == 1:  # One row, or the same for all.
        return (by_head * shares).to(bias.dtype).reshape(bias.shape)
    return RowBias(by_head, shares, bias.shape)


def positions_of(mask, seen, length, device):
    """The positions of the rows (b or 1, l), by a mask of tokens (b, k) or of pairs (b, 1, l, k) or without one."""
    columns = torch.arange(length, device=device) + seen
    if mask is None:
        return columns[None]
    if mask.ndim == 4:  # What a row may not look at is masked by True, or by a number below 0.
        return (mask == 0).sum(-1)[:, 0] - 1
    return (mask.to(device).cumsum(-1) - 1)[:, columns]


def model_forward(names, needs_mask, original, model, *args, **kwargs):
    """Run the family's model with the factors on the slopes of each row."""
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
    """Return a private copy of the family's modeling module for the checkpoint module named `stub`; one method."""
    module, (method,) = private_copy(stub, modeling), methods
    builder = next(name for name in BUILDERS if hasattr(module, name))
    setattr(module, builder, functools.partial(built, getattr(module, builder)))
    needs_mask = hasattr(module, "_get_alibi_slopes")  # BLOOM of transformers 5 builds one if it gets none.
    for cls in classes_of(module):
        if is_model(cls):
            replace(cls, "__init__", functools.partial(model_init, method))
        if cls.__name__ in MODEL_MAPPING_NAMES.values():
            check_arguments(cls, "attention_mask")
            replace(cls, "forward", functools.partial(model_forward, arguments_of(cls), needs_mask))
    return module
