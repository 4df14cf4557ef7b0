"""The parts of attention by relation maps: masks, positions of keys, tiles, and the cache of rotated keys.

This file is copied into checkpoints. Shapes: b batch, h heads, g key heads, l queries, n keys, d head.
"""

import functools
from collections import namedtuple

import torch
from transformers.cache_utils import Cache

from .method import refuse_mask, state_of


def first_base(call, length, total, mask):
    """Return the number of keys before the first query.

    Without a mask sdpa counts from the first key, other backends from the last.
    """
    counts_from_first = mask is None and length > 1 and "flash" not in call.backend and not call.is_left_to_engine
    return 0 if counts_from_first else total - length


def causal(rows, total, base, mask=None, window=0):
    """Return the keys (b or 1, l, n) that queries (b or 1, l), given by index, see without a mask of pairs."""
    keys, last = torch.arange(total, device=rows.device), (base + rows)[..., None]
    seen = (keys <= last) & (keys > last - window) if window else keys <= last
    return seen if mask is None else seen & (mask[:, None, :total] != 0)


def visible(mask, rows, total, base, window=0):
    """Return the keys (b or 1, l, n) that queries (b or 1, l), given by index, see by any backend's mask."""
    if hasattr(mask, "mask_mod"):  # Flex attention.
        batch = torch.arange(mask.shape[0], device=rows.device)[:, None, None]
        return mask.mask_mod(batch, torch.zeros_like(batch), rows[..., None], torch.arange(total, device=rows.device))
    if mask is None or mask.ndim == 2:  # Flash attention gets the tokenizer's mask.
        return causal(rows, total, base, mask, window)
    mask = mask[:, 0, :, :total]
    batch = max(len(mask), len(rows))
    picked = mask.expand(batch, -1, -1).gather(1, rows.expand(batch, -1)[..., None].expand(-1, -1, mask.shape[2]))
    return picked if picked.dtype == torch.bool else picked > torch.finfo(picked.dtype).min / 2


# The positions of the queries (b or 1, l) and of the keys (b or 1, n) of a call within their texts, and those of their
# rotation. Positions of keys that no query sees are arbitrary.
Places = namedtuple("Places", ["rows", "rotated", "keys", "rotated_keys"])
PIECE = 65536  # Number of values rotated at once, so that they stay in the cache of a CPU.
NOWHERE = 1 << 40  # The position of unused places in a cache: after every query.


def is_exporting():
    """Return whether torch.export records a graph. Its lengths are symbols, which cannot be keys or end a loop."""
    return getattr(torch.compiler, "is_exporting", lambda: False)()


def places_of(call, key, length, mask, base):
    """Return the Places of this call over keys (b, g, n, d), computed once per forward.

    The cache stores the positions of its keys.

    Raises:
        ValueError: the positions of the keys are not known.
    """
    if is_exporting():
        return find_places(call, key, length, mask, base)
    name = ("places", length, key.shape[2])
    if name not in call.memory:
        call.memory[name] = find_places(call, key, length, mask, base)
    return call.memory[name]


def find_places(call, key, length, mask, base):
    """Compute the Places for `places_of`. The cache stores (b, n, 2): positions of keys and of their rotation."""
    total, seen, traced = key.shape[2], call.seen, torch.compiler.is_compiling()
    has_cache = isinstance(call.cache, Cache) and seen is not None
    if torch.is_tensor(seen) and not traced:
        seen = int(seen)
    rows = torch.stack(torch.broadcast_tensors(call.positions, call.rotated), -1)
    if total > length and not has_cache:  # An engine's cache, which does not keep positions.
        return guessed_places(call, rows, total, length, mask, base)
    if has_cache and not torch.is_tensor(seen) and seen + length > total:
        return guessed_places(call, rows, total, length, mask, base)
    if not has_cache:
        return Places(*rows.unbind(-1), *rows.unbind(-1))
    kept = state_of(call.cache).rows.get("positions")
    if kept is None and (torch.is_tensor(seen) or seen == 0):
        kept = rows.new_zeros(len(key), 0, 2)
    if kept is None or (not torch.is_tensor(seen) and kept.shape[1] < seen):
        return guessed_places(call, rows, total, length, mask, base)
    given = call.tables.memory.get("given")
    if not traced and seen and given is not None and given.mask is None and call.positions is not call.rotated:
        first = seen + torch.arange(length, device=kept.device) - rows[..., 0]  # By the mask, where each text begins.
        first = torch.where((first < seen) & (rows[..., 0] > 0), first, 0).expand(len(key), -1)
        begins = kept[..., 0].gather(1, first) == 0
        if not bool((begins | (first == 0)).all()):
            refuse_mask("relation maps")
    if call.positions is call.rotated and kept.shape[1] and not torch.is_tensor(seen) and seen:
        # Passed positions continue those by which the cached tokens are rotated.
        last = kept[:, seen - 1, None]
        rows = rows + torch.nn.functional.pad(last[..., :1] - last[..., 1:], (0, 1))
    rows = rows.expand(len(key), -1, -1)
    if torch.is_tensor(seen) or seen + length < total:  # A static cache: positions are written in place too.
        if kept.shape[1] != total:
            kept = torch.cat([kept, kept.new_full((len(key), total - kept.shape[1], 2), NOWHERE)], 1)
            if not traced:
                torch._dynamo.mark_static_address(kept)
        kept.index_copy_(1, torch.arange(length, device=kept.device) + seen, rows)
    else:
        kept = torch.cat([kept[:, :seen], rows], 1)
    state_of(call.cache).rows["positions"] = kept
    if not traced and len(kept) > 1 and bool((kept == kept[:1]).all()):
        rows, kept = rows[:1], kept[:1]
    return Places(*rows.unbind(-1), *kept.unbind(-1))


def begins_again(m, mask, base):
    """Return whether query positions (b or 1, l) restart and no mask of pairs hides the tokens before."""
    if hasattr(mask, "mask_mod") or getattr(mask, "ndim", 2) == 4:
        return False
    if mask is not None:  # The positions of padding are arbitrary.
        shown = mask[:, base : base + m.shape[1]] != 0
        highest = m.masked_fill(~shown, -1).cummax(-1).values
        return bool((shown[:, 1:] & (m[:, 1:] < highest[:, :-1])).any())
    return bool((m.diff() < 0).any())


def guessed_places(call, rows, total, length, mask, base):
    """Return Places if positions of earlier keys are unknown: counted back from the queries, if no key is hidden."""
    m, rotated = rows.unbind(-1)
    keys, last = torch.arange(total, device=m.device), base + length - 1
    if not torch.compiler.is_compiling() and mask is not None:
        row = torch.full((1, 1), length - 1, device=m.device)
        seen = visible(mask, row, total, base)[:, 0]
        last_seen = (seen * keys).amax(-1, keepdim=True)
        if bool((seen.sum(-1, keepdim=True) != last_seen - seen.long().argmax(-1, keepdim=True) + 1).any()):
            raise ValueError(
                "The cache contains padding at unknown positions between tokens. Fill the cache with this model."
            )
        last = last_seen
    elif mask is not None:
        last = (visible(mask, m.argmax(-1, keepdim=True), total, base) * keys).amax(-1)
    return Places(m, rotated, *(positions[:, -1:] - last + keys for positions in (m, rotated)))


def plain_base(places, mask, total, base):
    """Return the number of keys before the first query if only causality hides keys and no position jumps, or None."""
    m, rotated, keys, rotated_keys = places
    length = m.shape[1]
    steps = torch.arange(length, device=m.device)
    if not bool((m == m[:1, :1] + steps).all() and (m == rotated).all()):
        return None
    if mask is not None and (not isinstance(mask, torch.Tensor) or mask.dtype.is_floating_point):
        return None
    is_shown = mask is not None and mask.ndim == 4
    if is_shown:  # A static cache has room for more keys than there are.
        base = int(mask[0, 0, 0, :total].sum()) - 1
        if base + length > total:
            return None
    count = torch.arange(base + length, device=m.device)
    if not bool((keys[:, : base + length] == count).all() and (rotated_keys[:, : base + length] == count).all()):
        return None
    if not is_shown:
        return base if mask is None or bool((mask[:, :total] != 0).all()) else None
    same = mask[..., :total] == causal(steps[None], total, base)[:, None]
    return base if bool(same.all()) else None


def served_rows(backend, count, length, mask):
    """Return the number of first queries to compute together, at least `count`, for bit-equality to a call of all.

    On a CPU sdpa divides queries by 256 and keys by 512, and computes differently below 768 queries.
    """
    if count == 0 or backend != "sdpa" or not (mask is None or mask.dtype == torch.bool):
        return count and length
    return min(max(-(-count // 512) * 512, 1024 if length >= 768 else 0), length)


def serve(inner, count, base, query, key, value, mask, kwargs):
    """Return the inner attention of the first `count` queries."""
    if count == query.shape[2]:
        return inner(query, key, value, mask, **kwargs)
    if kwargs.get("position_ids") is not None:
        kwargs = {**kwargs, "position_ids": kwargs["position_ids"][..., :count]}
    if mask is None:
        key, value = key[:, :, : base + count], value[:, :, : base + count]
    return inner(query[:, :, :count], key, value, mask if mask is None else mask[:, :, :count], **kwargs)


def join_outputs(changed, plan, unchanged, mapped):
    """Join outputs (b, l, h, d) and weights (b, h, l, n): `mapped` for the queries `changed` (b or 1, l)."""
    results = []
    for axis, whole, part in zip((1, 2), unchanged, mapped, strict=True):
        if part is None or (whole is None and plan.served):
            results.append(None)
            continue
        if plan.served:
            count = plan.served - plan.first
            here = changed[:, plan.first : plan.served]
            here = here[..., None, None] if axis == 1 else here[:, None, :, None]
            both = torch.where(here, part.narrow(axis, 0, count), whole.narrow(axis, plan.first, count))
            rest = part.narrow(axis, count, part.shape[axis] - count)
            part = torch.cat([whole.narrow(axis, 0, plan.first), both, rest], axis)
        results.append(part)
    return tuple(results)


def scaling(call, query, kwargs):
    """Return the factor on the scores."""
    given = kwargs.get("scaling")
    given = getattr(call, "scaling", None) if given is None else given
    return query.shape[-1] ** -0.5 if given is None else given


def scale_query(call, query, scales):
    """Multiply the query (b, h, l, d) by two factors (b or 1, l), None for 1: on all of it, and on its rotary part."""
    whole, rotating = (scale if scale is None else scale[:, None, :, None] for scale in scales)
    if rotating is not None and (width := 2 * len(call.tables.frame.inverse)) < query.shape[-1]:
        rest = torch.ones_like(rotating).expand(*rotating.shape[:3], query.shape[-1] - width)
        rotating = torch.cat([rotating.expand(*rotating.shape[:3], width), rest], -1)
    factor = whole if rotating is None else rotating if whole is None else whole * rotating
    return query if factor is None else (query.float() * factor).to(query.dtype)


def rotate_in_pieces(call, tensor, to, since, slowed=None, name=None):
    """Rotate a tensor (b, h, l, d) from positions to others by `call.turn`, in pieces that fit the CPU's cache.

    With a name, the result is in a buffer that the next tensor of this name overwrites, in this layer or a later one.
    """
    step = max(32, PIECE // (tensor.shape[0] * tensor.shape[1] * tensor.shape[3]))
    if torch.compiler.is_compiling() or tensor.requires_grad or tensor.shape[2] < 2 * step or tensor.is_cuda:
        return call.turn(tensor, to, since, slowed)
    name = name and (name, tensor.dtype, tensor.device)
    buffer = call.memory.get(name)
    if buffer is None or buffer.numel() < tensor.numel():
        buffer = tensor.new_empty(tensor.numel())
    if name:
        call.memory[name] = buffer
    result = buffer[: tensor.numel()].view(tensor.shape)
    for row in range(0, tensor.shape[2], step):
        piece = slice(row, row + step)
        ends = (x if x is None or x.shape[1] == 1 else x[:, piece] for x in (to, since, slowed))
        result[:, :, piece] = call.turn(tensor[:, :, piece], *ends)
    return result


def remove_hole(tensor, hole, axis):
    """Return a tensor without the keys between the two borders of a hole."""
    return torch.cat(
        [tensor.narrow(axis, 0, hole[0]), tensor.narrow(axis, hole[1], tensor.shape[axis] - hole[1])], axis
    )


def product(left, right):
    """Multiply (b, h, l, x) with (b, g, x, y), where h / g heads share one: (b, h, l, y)."""
    heads = left.shape[1] // right.shape[1]
    grouped = left.unflatten(1, (-1, heads)).flatten(2, 3) @ right
    return grouped.unflatten(2, (heads, -1)).flatten(1, 2)


def backend_arguments(call, kwargs):
    """Return the arguments that the backend applies: sdpa ignores the soft cap on scores."""
    return {**kwargs, "softcap": None} if call.backend == "sdpa" else kwargs


def apply_softmax(scores, value, mask, span, base, hidden, kwargs):
    """Return output (b, l, h, d) and weights (b, h, l, n) of the scores of queries span[0] to span[1].

    `value` is (b, g, n, d). `hidden` (b or 1, l, n) marks keys that the map does not read, or is None; `kwargs` are the
    attention's arguments.
    """
    low, end = torch.finfo(scores.dtype).min, scores.shape[3]
    if kwargs.get("softcap"):
        scores = torch.tanh(scores / kwargs["softcap"]) * kwargs["softcap"]
    if getattr(mask, "ndim", 0) == 4 and not hasattr(mask, "mask_mod"):
        seen = mask[:, :, span[0] : span[1], :end]
    else:
        rows = torch.arange(*span, device=scores.device)[None]
        seen = visible(mask, rows, end, base, kwargs.get("sliding_window") or 0)[:, None]
    scores = scores.masked_fill(~seen, low) if seen.dtype == torch.bool else scores + seen
    if hidden is not None:
        scores = scores.masked_fill(hidden[:, None], low)
    if kwargs.get("s_aux") is not None:  # A learned score that belongs to no key.
        none = kwargs["s_aux"].view(1, -1, 1, 1).expand(*scores.shape[:3], 1).to(scores.dtype)
        weights = torch.cat([scores, none], -1).softmax(-1, dtype=torch.float32)[..., :-1]
    else:
        weights = scores.softmax(-1, dtype=torch.float32)
    weights = torch.nn.functional.dropout(weights.to(value.dtype), kwargs.get("dropout") or 0.0)
    return product(weights, value).transpose(1, 2), weights


# Operators of attention that also return the log-sum-exp of each query. They are private to torch, so `operator` checks
# them before use.
OPERATORS = {
    "cpu": lambda q, k, v, bias, causal, scale: torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=bias, scale=scale
    ),
    "cuda": lambda q, k, v, bias, causal, scale: torch.ops.aten._scaled_dot_product_efficient_attention(
        q, k, v, bias, True, 0.0, causal, scale=scale
    ),
}


@functools.cache
def operator(kind, dtype):
    """Return the operator of a kind of device if it passes a check with this dtype, or None."""
    if kind not in OPERATORS:
        return None
    try:
        q, k = torch.linspace(-1, 1, 256, device=kind).to(dtype).view(2, 1, 2, 4, 16).unbind(0)
        bias = torch.zeros(4, 16, device=kind, dtype=dtype)[:, :4].fill_diagonal_(-torch.inf)
        for hides, causal in ((None, False), (None, True), (bias, False)):
            output, sums = OPERATORS[kind](q, k, k, hides, causal, 0.5)[:2]
            scores = q.double() @ k.double().transpose(2, 3) * 0.5
            scores = scores if hides is None else scores + hides
            scores = scores.masked_fill(torch.ones(4, 4, device=kind).triu(1) > 0, -torch.inf) if causal else scores
            torch.testing.assert_close(sums[..., :4].double(), scores.logsumexp(-1), rtol=0.01, atol=0.01)
            torch.testing.assert_close(output.double(), scores.softmax(-1) @ k.double(), rtol=0.02, atol=0.02)
    except (RuntimeError, AttributeError, TypeError, NotImplementedError, AssertionError):
        return None
    return OPERATORS[kind]


def attend_tile(query, key, value, form, bias, scale):
    """Return the attention (g, r, l, d) of a tile and its log-sum-exp (g, r, l).

    `query` is (g, r, l, d), `key` and `value` are (g, n, d).
    """
    heads, rows = query.shape[1:3]
    run = operator(query.device.type, query.dtype)
    if form == "causal":
        key, value = (tensor[:, None].expand(-1, heads, -1, -1) for tensor in (key, value))
        output, sums = run(query, key, value, None, True, scale)[:2]
        return output, sums[..., :rows]
    # Heads that share a key head are multiplied at once, which is faster.
    output, sums = run(query.flatten(1, 2)[None], key[None], value[None], bias, False, scale)[:2]
    return output[0].unflatten(1, (heads, rows)), sums[0, :, : heads * rows].unflatten(1, (heads, rows))


def attend_and_merge(parts):
    """Return the attention (g, r, d) of several parts, merged by log-sum-exp.

    Each part has a scaled query (g, r, d), a key and a value (g, n, d).
    """
    total = sums = None
    for part in parts:
        run, query = operator(part[0].device.type, part[0].dtype), part[0]
        output, more = run(*(tensor[None] for tensor in part), None, False, 1.0)[:2]
        wide = torch.promote_types(query.dtype, torch.float32)  # Halves are merged in float32.
        output, more = output[0].to(wide), more[0, :, : query.shape[1]].to(wide)
        if total is None:
            total, sums = output, more
        else:
            total, sums = total.lerp(output, torch.sigmoid(more - sums)[..., None]), torch.logaddexp(sums, more)
    return total.to(query.dtype)


def attend_by_products(parts):
    """Compute `attend_and_merge` by one softmax over all parts: faster on a CPU, but exact only in float32."""
    scores = [torch.bmm(query, key.mT) for query, key, _ in parts]
    shares = torch.softmax(torch.cat(scores, -1), -1).split([score.shape[2] for score in scores], -1)
    output = torch.bmm(shares[0], parts[0][2])
    for share, (_, _, value) in zip(shares[1:], parts[1:], strict=True):
        output.baddbmm_(share, value)
    return output


def band(rows, total, query, heads):
    """Return the bias of a band tile of `total` keys, for each head: query i sees the `total - rows` keys after i."""
    keys, row = torch.arange(total, device=query.device), torch.arange(rows, device=query.device)[:, None]
    room = query.new_zeros(rows, -(-total // 16) * 16)  # Some operators need an aligned bias.
    room[:, :total].masked_fill_((keys <= row) | (keys > row + total - rows), -torch.inf)
    return room.repeat(heads, 1)[None, None, :, :total]


def merge(total, sums, output, more, is_first):
    """Add a tile's output and log-sum-exp to those of the tiles before, in place."""
    if is_first:
        total.copy_(output)
        sums.copy_(more)
    else:
        total.lerp_(output.to(total.dtype), torch.sigmoid(more - sums)[..., None].to(total.dtype))
        torch.logaddexp(sums, more, out=sums)


# The rotated keys of one layer, stored with the cache: the levels and first positions of its sequences, one number for
# all or a list; a buffer (b, g, room, d); and the number of final keys. If the numbers are equal for all sequences, the
# keys move with them; otherwise they are rotated again.
Side = namedtuple("Side", ["levels", "origins", "buffer", "filled"])


def side_of(call, key, levels, origins):
    """Return the rotated keys kept for a layer, with room for all of key (b, g, n, d).

    `filled` is 0 if there are none.
    """
    state, name = state_of(call.cache), ("rotated keys", call.layer)
    *facts, filled = state.common.get(name) or state.derived.get(name) or (None, None, 0)
    buffer = state.rows.get(name)
    if buffer is None or facts != [levels, origins] or buffer.device != key.device:
        buffer, filled = key[:, :, :0], 0
    if buffer.shape[2] < key.shape[2]:
        longer = key.new_empty(*key.shape[:2], key.shape[2] + 256, key.shape[3])
        longer[:, :, :filled] = buffer[:, :, :filled]
        buffer = longer
    return Side(levels, origins, buffer, filled)


def keep_side(call, side):
    """Store rotated keys with the cache."""
    state, name = state_of(call.cache), ("rotated keys", call.layer)
    state.rows[name] = side.buffer
    for facts in (state.common, state.derived):
        facts.pop(name, None)
    facts = state.derived if isinstance(side.levels, list) else state.common
    facts[name] = side.levels, side.origins, side.filled


def next_position(call, key, mask):
    """Return the position of a single query after keys (b, g, n, d) at 0, 1, ..., all of them visible, or None."""
    total, name = key.shape[2], ("next position", key.shape[2])
    if name not in call.memory:
        call.memory[name] = None
        if mask is None and isinstance(call.cache, Cache) and not torch.is_tensor(call.seen):
            counted = state_of(call.cache).common.get("counted")
            if counted == call.seen == total - 1:
                places = places_of(call, key, 1, mask, total - 1)
                if set(torch.cat([places.rows, places.rotated]).flatten().tolist()) == {total - 1}:
                    state_of(call.cache).common["counted"] = total
                    call.memory[name] = total - 1
    return call.memory[name]


def can_keep(call):
    """Return whether there is a cache with which rotated keys can be kept."""
    return isinstance(call.cache, Cache) and not torch.compiler.is_compiling()
