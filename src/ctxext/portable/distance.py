"""Distance-aware attention: every head learns a factor on its scores that depends on the distance.

This file is copied into checkpoints. A step contains `original_length` (L), `num_heads` and `layers`. Each attention of
these layers has two weights per head, w and v: a positive score between tokens at distance d is multiplied by
(1 + e^v) / (1 + e^(v - w d / L)), other scores stay unchanged. At w = 0 no score changes. Paper:
"DA-Transformer", https://arxiv.org/abs/2010.06925, section 3.2. Shapes: b batch, h heads, g key heads, l queries, n
keys, d head.
"""

from collections import namedtuple

import torch
from torch.utils.checkpoint import checkpoint

from .method import Method
from .relation_parts import apply_softmax, backend_arguments, first_base, is_exporting, places_of, product, scaling

BLOCK = 128  # Number of queries with scores in memory at once.
PLACE = "distance"  # The attribute of an attention that contains its weights.


Rows = namedtuple("Rows", "span base places mask kwargs")  # A block of queries, and the arguments of the call.


class DistanceWeights(torch.nn.Module):
    """Weights of one attention layer, (2, h): w, then v. A module, so that PEFT's `modules_to_save` can train it."""

    def __init__(self, heads):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(2, heads))

    def forward(self, like):
        """Return the weights in float32, on the device of `like`."""
        return self.weight.to(like.device, torch.float32)


class DistanceAware(Method):
    """Method that multiplies positive scores by each head's learned function of the distance."""

    name = "distance-aware"

    def equip(self, attention):
        """Add the weights to an attention."""
        if not hasattr(attention, PLACE):
            setattr(attention, PLACE, DistanceWeights(self.settings["num_heads"]))

    def attend(self, inner, call, query, key, value, mask, **kwargs):
        """Return the output (b, l, h, d) for query (b, h, l, d), key and value (b, g, n, d), and weights or None."""
        numbers = getattr(call.attention, PLACE)(query)
        if numbers.shape[1] != query.shape[1]:
            raise ValueError(f"{self.name} has weights for {numbers.shape[1]} heads, not {query.shape[1]}.")
        learns = torch.is_grad_enabled() and numbers.requires_grad
        if not (torch.compiler.is_compiling() or learns or bool(numbers[0].any())):
            return inner(query, key, value, mask, **kwargs)
        call.needs_sequences(self.name)
        call.needs_causality(self.name, kwargs.get("is_causal"))
        length, total = query.shape[2], key.shape[2]
        base = first_base(call, length, total, mask)
        places = places_of(call, key, length, mask, base)
        starts, blocks = [0] if is_exporting() else range(0, length, BLOCK), []
        for start in starts:
            span = start, length if is_exporting() else min(start + BLOCK, length)
            rows = Rows(span, base, places, mask, kwargs)
            inputs = call, rows, numbers, query[:, :, start : span[1]], key, value
            if torch.is_grad_enabled() and not torch.compiler.is_compiling():
                blocks.append(checkpoint(self.block, *inputs, use_reentrant=False))  # Scores are not stored.
            else:
                blocks.append(self.block(*inputs))
        outputs, weights = zip(*blocks, strict=True)
        return torch.cat(outputs, 1), torch.cat(weights, 2) if call.backend == "eager" else None

    def block(self, call, rows, numbers, query, key, value):
        """Return the output (b, l, h, d) and weights (b, h, l, n) of a block of query positions."""
        span, places = rows.span, rows.places
        scores = product(query, key.mT) * scaling(call, query, rows.kwargs)
        positions = places.rows[:, span[0] : span[1]]
        distances = (positions[:, :, None] - places.keys[:, None]).clamp(min=0) / self.settings["original_length"]
        w, v = numbers[:, None, :, None, None]
        grown = torch.nn.functional.logsigmoid(w * distances[:, None] - v) - torch.nn.functional.logsigmoid(-v)
        scores = torch.where(scores > 0, (scores * grown.exp()).to(scores.dtype), scores)
        return apply_softmax(scores, value, rows.mask, span, rows.base, None, backend_arguments(call, rows.kwargs))
