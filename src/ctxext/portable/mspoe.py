"""Ms-PoE: one position scale per KV head, ordered once at conversion or by each prompt.

Paper: "Found in the Middle", https://arxiv.org/abs/2403.04797. A step contains `ratios` (one per KV head, ascending),
`layers` (those that take part), `schedule`, `rescale`, `variant`, and `pairs` if fewer pairs rotate than have a
frequency. `ranks` has the index of each head's ratio for each layer; without it, each prompt chooses. Shapes: b batch,
g KV heads, n queries per KV head, l length, d rotary, r ratios, c columns of cos and sin.
"""

import functools
import math

import torch
from transformers.utils import logging

from .method import Method, Row, angles_of, compute_cos_sin, per_column, state_of

PIECE = 131072  # Number of a query's values that are rotated at once on a CPU, so that they stay in its cache.
CALIBRATED = "A conversion with --head-order calibrated gives the same results however it is run."


class MsPoE(Method):
    """Method that rotates each KV head, and all queries that read it, with that head's ratio."""

    name = "mspoe"
    kept = None  # The columns and inverse frequencies of the last call, and the result of `frequencies`.
    length = 0  # Length of the last call without a cache, to detect a text that grows.

    def __init__(self, settings):
        super().__init__(settings)
        self.counts_in_texts = settings.get("rescale", "uniform") != "uniform"

    def tables(self, inner, frame, turn):
        """Return the inner tables, for layers that do not take part, and cos and sin of every ratio (r, b, l, 2 c)."""
        angles = angles_of(turn, self.frequencies(frame)[:, None, None], self.move_positions)
        return inner(frame, turn), torch.cat(compute_cos_sin(frame, angles), -1)

    def frequencies(self, frame):
        """Return the frequencies (r, c) of every ratio. On a CPU they are reused while the model's are the same."""
        if torch.compiler.is_compiling() or frame.inverse.device.type != "cpu":
            return head_frequencies(self.settings, frame.inverse)[:, frame.columns]
        columns, inverse, kept = frame.columns, frame.inverse, self.kept  # Threads may replace `self.kept`.
        if kept is None or kept[0] is not columns or not torch.equal(kept[1], inverse):
            kept = self.kept = columns, inverse.clone(), head_frequencies(self.settings, inverse)[:, columns]
        return kept[2]

    def move_positions(self, positions):
        """Return the positions for each ratio, (1 or r, b, l, 1 or c): only a range of them may be compressed."""
        positions = per_column(positions)[None]
        if self.settings["rescale"] == "uniform":
            return positions
        start, end = self.settings["rescale"]
        ratios = torch.tensor(self.settings["ratios"], device=positions.device).view(-1, 1, 1, 1)
        return positions - (positions.clamp(start, end) - start) * (1 - 1 / ratios)

    def rotate(self, inner, tensors, tables, axis, call):
        """Rotate each KV head and its queries as one group, with the table of the head's ratio."""
        plain, table = tables
        if not self.acts_on(call.layer):
            return inner(tensors, plain, axis, call)
        total = len(self.settings["ratios"])
        if len(tensors) == 2 and call.kv_heads is None:
            call.see_heads(tensors[1].shape[axis], total)
        heads = call.kv_heads or total
        here = slice(call.first_head, call.first_head + heads)  # Under tensor parallelism a rank has some of them.
        length = tensors[0].shape[3 - axis]
        if length == 1 and (row := self.row(inner, call, table, here)) is not None:
            return row.rotate(tensors, call)
        tensors = [tensor.view(*tensor.shape[:axis], heads, -1, *tensor.shape[axis + 1 :]) for tensor in tensors]
        rows = 3 if axis == 1 else 1  # The axis of query positions.
        ranks = self.ranks(call, tensors, axis)
        pick_piece = functools.partial(pick, table, ranks if ranks.shape[1] == heads else ranks[:, here])

        def rotate_piece(start, count):
            cos, sin = pick_piece(start, count)
            if axis == 2:
                cos, sin = cos.transpose(1, 2), sin.transpose(1, 2)
            pieces = tensors if count == length else [tensor.narrow(rows, start, count) for tensor in tensors]
            return inner(pieces, (cos, sin), axis + 1, call)

        step = max(32, PIECE * length // max(tensors[0].numel(), 1))
        if length < 2 * step or torch.compiler.is_compiling() or any(x.requires_grad or x.is_cuda for x in tensors):
            return [tensor.flatten(axis, axis + 1) for tensor in rotate_piece(0, length)]
        results = []
        for start in range(0, length, step):
            count = min(step, length - start)
            pieces = rotate_piece(start, count)
            if not results:
                pairs = zip(tensors, pieces, strict=True)
                results = [torch.empty_like(tensor, dtype=piece.dtype) for tensor, piece in pairs]
            for result, piece in zip(results, pieces, strict=True):
                result.narrow(rows, start, count).copy_(piece)
        return [result.flatten(axis, axis + 1) for result in results]

    def row(self, inner, call, table, here):
        """Return the `Row` of a layer, picked for all layers at once, or None if each layer must pick its tables."""
        if torch.compiler.is_compiling() or table.shape[1] > 1:
            return None
        name, layers = (self.name, "row", id(table)), self.settings["layers"]
        if name not in call.memory:
            ranks = self.settings.get("ranks")
            if ranks is not None:
                ranks = torch.tensor(ranks, device=table.device)
            elif call.cache is not None:
                kept = [state_of(call.cache).rows.get((self.name, layer)) for layer in layers]
                is_whole = all(x is not None and len(x) == 1 and x.device == table.device for x in kept)
                ranks = torch.cat(kept) if is_whole else None
            if ranks is None:
                return None
            cos, sin = pick(table, ranks[:, here] if ranks.shape[1] > here.stop - here.start else ranks)
            pairs = zip(cos[:, :, 0].split(1), sin[:, :, 0].split(1), strict=True)
            rows = {layer: Row(inner, pair) for layer, pair in zip(layers, pairs, strict=True)}
            call.memory[name] = table, rows
            if len(call.methods) == 1:  # The next layers need nothing else.
                call.memory["rows"] = rows
        return call.memory[name][1][call.layer]

    def ranks(self, call, tensors, axis):
        """Return the index of each head's ratio, (1 or b, g): from the recipe, from the cache, or chosen now."""
        if "ranks" in self.settings:
            ranks = self.settings["ranks"][self.settings["layers"].index(call.layer)]
            return torch.tensor([ranks], device=tensors[0].device)
        place = (self.name, call.layer)
        if place not in call.layer_memory:
            kept = state_of(call.cache).rows.get(place) if call.cache is not None else None
            self.warn(call, tensors[0].shape[0], tensors[0].shape[3 if axis == 1 else 1], kept is not None)
            call.layer_memory[place] = self.choose(call, tensors, axis) if kept is None else kept
            if call.cache is not None:
                state_of(call.cache).rows[place] = call.layer_memory[place]
        return call.layer_memory[place]

    def warn(self, call, batch, length, is_chosen):
        """Warn once if the heads are ordered by something other than the whole prompt."""
        if torch.compiler.is_compiling() or torch.is_grad_enabled() or call.layer != self.settings["layers"][0]:
            return
        grows, self.length = call.cache is None and length == self.length + 1, 0 if call.cache is not None else length
        if is_chosen and length > 1:
            reason = "a cache continues with several tokens, but only its first part ordered the heads"
        elif grows:
            reason = "a text grows without a cache, so every new token orders the heads again"
        elif batch > 1 and call.mask is None and not is_chosen:
            reason = "a batch has no mask; if its rows are padded, padding orders the heads"
        else:
            return
        logging.get_logger("transformers.ctxext").warning_once(f"Ms-PoE in prompt order: {reason}. {CALIBRATED}")

    def choose(self, call, tensors, axis):
        """Choose the index of each head's ratio for this prompt, (b, g), by the awareness of its last query."""
        call.needs_sequences("Ms-PoE in prompt order (--head-order calibrated does not)")
        if call.kv_heads != len(self.settings["ratios"]):
            raise ValueError("Under tensor parallelism no rank sees all heads: convert with --head-order calibrated.")
        if self.sees_packed(call):
            raise ValueError(
                "Ms-PoE in prompt order sorts the heads once per batch entry. Packed sequences, with positions that "
                "restart or jump, need a conversion with --head-order calibrated."
            )
        query, key = (tensor if axis == 1 else tensor.movedim(1, 3) for tensor in tensors)
        return self.order(call, awareness(query, key[:, :, 0], call.mask, call.scaling))

    def sees_packed(self, call):
        """Return whether this forward has packed sequences, computed once per forward; False while tracing."""
        if torch.compiler.is_compiling():
            return False
        name = (self.name, "packed")
        if name not in call.memory:
            call.memory[name] = is_packed(call.positions, call.mask)
        return call.memory[name]

    def order(self, call, scores):
        """Order a layer's heads by awareness (b, g), ties by index; the most aware gets the smallest ratio."""
        order = scores.argsort(dim=-1, descending=True, stable=True)
        # The released code uses the order as indices of ratios; in the paper the index is the head's rank in the order.
        return order if self.settings["variant"] == "released" else order.argsort(-1)


def visible_keys(mask, length):
    """Return the keys that the last query sees, (1 or b, l), or None if it sees all of them."""
    mask = mask["causal"] if isinstance(mask, dict) else mask
    if hasattr(mask, "mask_mod"):  # Flex attention.
        keys = torch.arange(length, device=mask.kv_num_blocks.device)
        rows = torch.arange(mask.shape[0], device=keys.device)[:, None]
        return mask.mask_mod(rows, keys[:1], keys[-1:], keys).expand(len(rows), length)
    if mask is None or mask.ndim == 2:  # Flash attention gets the tokenizer's mask.
        return None if mask is None else mask[:, :length] != 0
    row = mask[:, 0, length - 1, :length]
    return row if row.dtype == torch.bool else row > -1


def is_packed(positions, mask):
    """Return whether a row of the batch contains several sequences.

    Then positions (b or 1, l) decrease, or a token does not see the previous one. Positions of padding are ignored,
    because it does not see itself.
    """
    mask = mask["causal"] if isinstance(mask, dict) else mask
    back = positions.diff() < 0
    if mask is None:
        return bool(back.any())
    if hasattr(mask, "mask_mod"):  # Flex attention.
        keys = torch.arange(positions.shape[1], device=mask.kv_num_blocks.device)
        rows = torch.arange(mask.shape[0], device=keys.device)[:, None]
        spans = ((keys[at:], keys[: len(keys) - at]) for at in (0, 1))
        shown, before = (mask.mask_mod(rows, keys[:1], *span).expand(len(rows), -1) for span in spans)
    elif mask.ndim == 2:  # Flash attention gets the tokenizer's mask, which hides nothing between tokens.
        shown = mask[:, : positions.shape[1]] != 0
        before = shown[:, :-1]
    else:
        shown, before = (mask[:, 0].diagonal(-at, 1, 2)[:, : positions.shape[1] - at] for at in (0, 1))
        shown, before = (seen if seen.dtype == torch.bool else seen > -1 for seen in (shown, before))
    return bool((shown[:, 1:] & shown[:, :-1] & (back | ~before)).any())


@torch.no_grad()
def awareness(query, key, mask=None, scaling=None):
    """Return the share of keys with over three times the last query's mean attention, (b, g), from un-rotated states.

    `query` is (b, g, n, l, d), `key` (b, g, l, d). Only the scores of the last query are computed, in float32.
    """
    seen = visible_keys(mask, key.shape[2])
    if seen is None:
        last, count = query[:, :, :, -1], key.shape[2]
    else:
        seen = seen.to(key.device).expand(len(key), -1)
        end = (seen * torch.arange(key.shape[2], device=key.device)).amax(-1)
        last = query.gather(3, end.view(-1, 1, 1, 1, 1).expand_as(query[:, :, :, :1])).squeeze(3)
        count = seen.sum(-1).view(-1, 1, 1, 1)
    scores = last.float() @ key.float().transpose(2, 3) * (scaling or key.shape[3] ** -0.5)
    scores = scores if seen is None else scores.masked_fill(~seen[:, None, None], -math.inf)
    # A query's mean is one over its number of keys. Queries that share a KV head share one count, because whole numbers
    # tie exactly, in any precision.
    return ((scores.softmax(-1) * count > 3).sum((2, 3), keepdim=True) / (count * query.shape[2])).flatten(1)


def head_frequencies(settings, inverse):
    """Evaluate the schedule at every ratio, on top of the model's own inverse frequencies (d / 2): (r, d / 2)."""
    ratios, size = torch.tensor(settings["ratios"], device=inverse.device)[:, None], len(inverse)
    if settings["rescale"] != "uniform":
        return inverse.expand(len(ratios), -1)
    if settings["schedule"] == "ntk":  # The base times ratio ** (d / (d - 2)), written per frequency.
        count = settings.get("pairs", size)  # Fewer rotate in families that fill up with frequencies of 0.
        exponents = torch.linspace(0, 1, count, device=inverse.device)
        return inverse / ratios ** torch.nn.functional.pad(exponents, (0, size - count), value=1.0)
    if settings["schedule"] == "by-parts":  # YaRN's ramp, from frequencies that stay to those that slow down.
        rotations = (settings["trained_length"] / (2 * math.pi * settings[beta]) for beta in ("beta_fast", "beta_slow"))
        first, last = (size * math.log(count) / math.log(settings["theta"]) for count in rotations)
        first, last = max(math.floor(first), 0), min(math.ceil(last), 2 * size - 1)
        steps = torch.arange(size, device=inverse.device) - first
        return inverse * (1 - (steps / max(last - first, 0.001)).clamp(0, 1) * (1 - 1 / ratios))
    return inverse / ratios


def pick(table, ranks, start=0, count=None):
    """Return cos and sin (b, g, l, c) from tables (r, b, l, 2 c) and the indices of the heads' ratios (1 or b, g).

    With a count, only those of `count` positions from index `start` on.
    """
    batch = table.shape[1]
    table = table if count in (None, table.shape[2]) else table[:, :, start : start + count]
    rows = ranks if batch == 1 else ranks * batch + torch.arange(batch, device=ranks.device)[:, None]
    picked = table.flatten(0, 1).index_select(0, rows.flatten())
    return picked.view(*rows.shape, *picked.shape[1:]).chunk(2, -1)
