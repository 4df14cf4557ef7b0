"""Attention by relation maps: every query reads near and far keys by a rule of its position, in one softmax.

This file travels inside checkpoints. Queries and keys arrive rotated by their positions, and are cached so; far ones
are rotated to the positions of the map. Queries that the map does not change are bit-equal to the inner attention. The
others take one of four forms, each with its own plan. If only causality hides keys: tiles merged by their log-sum-exp,
or for a single query one softmax of near and far keys, which no step copies. Otherwise: one call of the inner attention
for a single query, or blocks of queries with one softmax. In names, `row` is a query position, `rung` a level (see
`relation_maps`) and `turned` rotated. Shapes: b batch, h heads, g key heads, l queries, n keys, d head.
"""

from collections import namedtuple

import torch
from torch.utils.checkpoint import checkpoint

from .method import Method, state_of
from .relation_maps import Beyond, stages
from .relation_parts import (
    Places,
    attend_and_merge,
    attend_by_products,
    attend_tile,
    band,
    begins_again,
    can_keep,
    first_base,
    is_exporting,
    joined,
    keep_side,
    merge,
    next_position,
    operator,
    places_of,
    plain_base,
    product,
    scaled,
    scaling,
    serve,
    served_rows,
    side_of,
    softmaxed,
    taken,
    turned,
    without,
)

BLOCK = 128  # Number of queries with scores in memory at once.
AHEAD = 16  # Number of queries or keys rotated at once while decoding.
RUNGS = 64  # Maximum number of levels of a traced call, which computes each of them for all queries.
# The plan of a call, one class for each form. All layers with one mask and one map share it. `map`: the map; `places`:
# positions of queries and keys; `rows`, `scales`: the map's values for queries; `base`: the number of keys before the
# first query; `first`: the first query that changes; `served`: the number of queries that the inner attention serves.
Inside = namedtuple("Inside", [])  # No query changes: the inner attention alone.
# A single query in one call of the inner attention: keys below `low` stay far for later queries while `rungs` (levels)
# and `origins` are the same, None if no rotated keys are kept; keys between the two borders of `hole` are not read.
One = namedtuple("One", ["map", "places", "rows", "scales", "low", "rungs", "origins", "hole"])
# A single query with far, middle and near keys: its level, the `parts` (name, first key, end), and the `matrix`
# (d, parts * d) that scales and rotates it for each of them, or None if heads differ, with `rows` and `scales` instead.
Step = namedtuple("Step", ["map", "places", "rows", "scales", "base", "rung", "parts", "matrix"])
Tiles = namedtuple("Tiles", ["map", "places", "rows", "scales", "base", "first", "served", "stages"])
Blocks = namedtuple("Blocks", ["map", "places", "rows", "scales", "base", "first", "served", "blocks"])
# Queries `start` to `stop`: keys below `low` are far for all of them, from `high` on near, and from `end` on hidden.
# Each level that occurs is a tensor (b or 1, 1): one for each sequence of the batch.
Block = namedtuple("Block", ["start", "stop", "low", "high", "end", "rungs"])


class Relation(Method):
    """Attention by a map: the keys that a query reads, and their distances. Subclasses set `name`."""

    map_class = None  # The map of all layers, unless `map_of` returns one per layer.

    def __init__(self, settings):
        super().__init__(settings)
        self.map = self.map_class(settings) if self.map_class else None
        self.maps = {layer: self.map_of(layer) for layer in settings.get("layers", ())}
        self.kept = {}  # The results of `kept_for`.

    def map_of(self, layer):
        """Return the map of a layer. Layers with the same object share their plans."""
        return self.map

    def attend(self, inner, call, query, key, value, mask, **kwargs):
        """Return the output (b, l, h, d) for query (b, h, l, d), key and value (b, g, n, d), and weights or None."""
        if not call.is_left_to_engine:
            call.needs_sequences(self.name)
            call.needs_causality(self.name, kwargs.get("is_causal"))
        plan = self.plan(call, self.maps.get(call.layer, self.map), query, key, value, mask, kwargs)
        if isinstance(plan, Inside):
            return inner(query, key, value, mask, **kwargs)
        if isinstance(plan, One):
            return inner(*self.one(call, plan, query, key, value, mask), **kwargs)
        if isinstance(plan, Step):
            return self.step(call, plan, query, key, value, scaling(call, query, kwargs)), None
        stock = None, None
        if plan.served:
            stock = serve(inner, plan.served, plan.base, query, key, value, mask, kwargs)
        if isinstance(plan, Tiles):
            return self.tiles(call, plan, stock[0], query, key, value, scaling(call, query, kwargs)), None
        mapped = self.blocks(call, plan, query, key, value, mask, kwargs)
        return joined(plan.places.rows >= plan.map.first, plan, stock, mapped)

    def plan(self, call, rules, query, key, value, mask, kwargs):
        """Return the plan of this call by a map, computed once per forward from positions and masks unless traced."""
        if torch.compiler.is_compiling():
            return self.traced_plan(call, rules, query, key, mask)
        # Reentrant checkpointing comes twice: without gradients, then with them, which tiles do not have.
        name = (self.name, id(rules), id(mask), query.shape[2], key.shape[2], query.device, trains(query, key, value))
        if name not in call.memory:
            m = next_position(call, key, mask) if query.shape[2] == 1 else None
            plan = self.next_plan(call, rules, m, query, key, value, kwargs) if m is not None else None
            if plan is None:
                plan = self.cheapest_plan(call, rules, query, key, value, mask, kwargs)
            call.memory[name] = plan, mask  # Keeps the mask alive: its id is in the name.
        return call.memory[name][0]

    def traced_plan(self, call, rules, query, key, mask):
        """Return a plan that does not read positions: one call for a single query; several are computed both ways.

        Raises:
            ValueError: the length is not known, or the map has too many levels.
        """
        length, total = query.shape[2], key.shape[2]
        if not isinstance(length, int):
            raise ValueError(f"{self.name}: torch.export needs strict=True to record a dynamic length.")
        base = first_base(call, length, total, mask)
        places = places_of(call, key, length, mask, base)
        rows, scales = rules.rows(places.rows, places.rotated), scales_of(rules, places.rows)
        if length == 1 and (not rules.drops_keys or getattr(mask, "ndim", 0) == 4):
            return One(rules, places, rows, scales, 0, None, None, ())
        target = self.settings.get("target_length", rules.length)
        last = rules.last_rung(target if is_exporting() else max(target, total))
        message = f"{self.name}: a position is beyond the target length {target}, for which this graph was recorded."
        beyond = rows.rung > last
        torch._assert_async(~beyond.any(), message)
        first = int(rules.first == rules.start)
        if last - first >= RUNGS:
            raise ValueError(
                f"{self.name}: {last + 1 - first} levels of far keys, which a compiled call computes for every row; "
                f"at most {RUNGS} are possible. Run it without torch.compile, or for a shorter target length."
            )
        rungs = [torch.full_like(places.rows[:, :1], rung) for rung in range(first, last + 1)]
        if is_exporting():  # Other formats drop assertions, so that rows beyond the levels become NaN as well.
            query.masked_fill_(beyond[:, None, :, None], torch.nan)
            spans = [(0, length)]
        else:
            spans = [(start, min(start + BLOCK, length)) for start in range(0, length, BLOCK)]
        blocks = [Block(*span, 0, total, total, rungs) for span in spans]
        return Blocks(rules, places, rows, scales, base, 0, length, blocks)

    def cheapest_plan(self, call, rules, query, key, value, mask, kwargs):
        """Return the cheapest plan for these positions and this mask.

        Raises:
            ValueError: positions begin again, and no mask hides the text before.
        """
        length, total = query.shape[2], key.shape[2]
        base = first_base(call, length, total, mask)
        places = places_of(call, key, length, mask, base)
        m = places.rows
        if int(m.max()) < rules.first:
            return Inside()
        if begins_again(m, mask, base):
            raise ValueError(
                f"{self.name}: positions restart within a sequence, but no mask separates the texts. Without a cache "
                "and an attention_mask, transformers creates one: pass use_cache=False and no mask, or a 4D mask."
            )
        changed = m >= rules.first
        first = int(changed.any(0).long().argmax())
        served = 0 if bool(changed.all()) else int((~changed).any(0).nonzero().amax()) + 1
        served = served_rows(call.backend, served, length, mask)
        plain = plain_base(places, mask, total, base)
        start, has_gradients = int(m[0, first]), trains(query, key, value)
        if not has_gradients and plain == start - first and is_tiled(call, query, value, total, kwargs):
            if length == 1:
                if plain == total - 1 and can_keep(call):
                    state_of(call.cache).common["counted"] = total
                return self.step_plan(call, rules, start, query)
            m = m[:1, first:]
            rows, scales, places = rules.rows(m, m), scales_of(rules, m), Places(m, m, None, None)
            to_do = stages(rules, start, start + length - first)
            return Tiles(rules, places, rows, scales, plain, first, served, to_do)
        rows, scales = rules.rows(m, places.rotated), scales_of(rules, m)
        if length == 1 and (not rules.drops_keys or plain is not None or getattr(mask, "ndim", 0) == 4):
            return self.one_plan(rules, places, rows, scales, plain, len(key), has_gradients)
        blocks = block_pieces(rows, places.keys, mask, base, first)
        return Blocks(rules, places, rows, scales, base, first, served, blocks)

    def one_plan(self, rules, places, rows, scales, plain, batch, trains):
        """Return the plan of one call for a single query."""
        keys = places.keys
        rungs, origins = rows.rung.expand(batch, 1), keys[:, :1].expand(batch, 1)
        if rules.drops_keys:
            hole = [int(border[0, 0] - origins[0, 0]) for border in (rows.far, rows.near)] if plain is not None else ()
            return One(rules, places, rows, scales, 0, None, None, hole)
        is_kept = self.settings.get("side_cache", True) and not trains
        is_far = keys < rows.far  # Up to the first that is not, as padding has any position.
        low = int(is_far.long().cumprod(-1).sum(-1).amin())
        rungs, origins = rungs[:, 0].tolist(), origins[:, 0].tolist()
        if len({*zip(rungs, origins, strict=True)}) == 1:
            rungs, origins = rungs[0], origins[0]
        return One(rules, places, rows, scales, low, rungs if is_kept else None, origins, ())

    def one(self, call, plan, query, key, value, mask):
        """Return query, key, value and mask of one call that reads every key at the map's distance.

        The query is rotated to its position for far keys, and near keys by as much. If a map does not rotate far keys,
        they are rotated here instead of the query.
        """
        rows, total = plan.rows, key.shape[2]
        query, places = scaled(call, query, plan.scales), plan.places
        n, rotated = places.keys, places.rotated
        if plan.hole:  # Only the first keys are rotated.
            first = call.turn(key[:, :, : plan.hole[0]], rotated, rows.at_far)
            key = torch.cat([first, key[:, :, plan.hole[1] :]], 2)
            mask = mask if mask is None else without(mask[..., :total], plan.hole, -1)
            return query, key, without(value, plan.hole, 2), mask
        if plan.map.drops_keys:
            hidden = ((n >= rows.far) & (n < rows.near))[:, None, None]
            mask = mask[..., :total]
            mask = mask & ~hidden if mask.dtype == torch.bool else mask.masked_fill(hidden, torch.finfo(mask.dtype).min)
        side = side_of(call, key, plan.rungs, plan.origins) if plan.rungs is not None and can_keep(call) else None
        start = min(side.filled, plan.low) if side else 0
        slowed = plan.map.slowed(rows.rung)
        key = turned(call, key[:, :, start:], *self.ends(plan, start), slowed)
        if side:
            side.buffer[:, :, start:total] = key
            keep_side(call, side._replace(filled=min(plan.low, total)))
            key = side.buffer[:, :, :total]
        return turned(call, query, rows.at_far, rotated, slowed) if plan.map.turns_keys else query, key, value, mask

    def ends(self, plan, start):
        """Return the positions to which keys from number `start` on rotate for one call, and the current ones."""
        places, rows = plan.places, plan.rows
        n, rotated = places.keys[:, start:], places.rotated_keys[:, start:]
        if plan.map.turns_keys:  # The query is at its position for far keys; others rotate by as much.
            far, other = (plan.map.keys(n, rotated, rows.rung), rotated), (rows.at_far, places.rotated)
        else:
            far, other = (places.rotated, rows.at_far), (rotated, rotated)
        ends = [torch.where(n < rows.far, *pair) for pair in zip(far, other, strict=True)]
        if rows.at_middle is None:
            return ends
        is_middle = (n >= rows.middle) & (n < rows.near)
        return [torch.where(is_middle, *pair) for pair in zip((rows.at_far, rows.at_middle), ends, strict=True)]

    def next_plan(self, call, rules, m, query, key, value, kwargs):
        """Return the plan of a single query at m after keys that are all visible, or None if it takes no step."""
        if m < rules.first:
            return Inside()
        if trains(query, key, value):
            return None
        return self.step_plan(call, rules, m, query) if is_tiled(call, query, value, m + 1, kwargs) else None

    def step_plan(self, call, rules, m, query):
        """Return the plan of a step at m. Its inputs are computed for several positions at once, and kept."""
        (start, at), size, device = (m // AHEAD * AHEAD, m % AHEAD), query.shape[3], query.device
        rows, scales, borders, matrices = self.kept_for(
            call, (id(rules), size, device), start, lambda: self.ahead(call, rules, start, size, device)
        )
        rung, far, middle, near = borders[at]
        parts = ("far", 0, far), ("middle", middle, near), ("near", near, m + 1)
        parts = [part for part in parts if part[0] != "middle" or rows.at_middle is not None]
        if matrices is not None:
            return Step(rules, None, None, None, m, rung, parts, matrices[at])
        rows = Beyond(*(x if x is None else x[:, at : at + 1] for x in rows))
        scales = tuple(x if x is None else x[:, at : at + 1] for x in scales)
        places = Places(torch.full((1, 1), m, device=device), None, None, None)
        return Step(rules, places, rows, scales, m, rung, parts, None)

    def ahead(self, call, rules, start, size, device):
        """Return the Beyond, scales, borders as numbers, and matrices of the steps from position `start` on."""
        m = torch.arange(start, start + AHEAD, device=device)[None]
        rows, scales, matrices = rules.rows(m, m), scales_of(rules, m), None
        borders = torch.stack([rows.rung, rows.far, rows.middle, rows.near], -1)[0].tolist()
        if call.rotates_heads_alike:
            names = ["far", "near"] if rows.at_middle is None else ["far", "middle", "near"]
            queries = self.step_queries(call, rules, m, rows, scales, names, vectors(size, device))
            matrices = torch.cat(queries, -1)[0].transpose(0, 1).contiguous()
        return rows, scales, borders, matrices

    def kept_for(self, call, name, number, compute):
        """Return a computed result, kept until the number or the frequencies change."""
        inverse = call.tables.frame.inverse
        kept = self.kept.get(name)
        if kept is None or kept[0] != number or not torch.equal(kept[1], inverse):
            kept = self.kept[name] = number, inverse.clone(), compute()
        return kept[2]

    def step_queries(self, call, rules, m, rows, scales, names, query):
        """Return the queries (b, h, l, d) at m, scaled and rotated for each of their parts."""
        query = scaled(call, query, scales)
        ends = {"middle": (rows.at_middle, None), "far": (rows.at_far, rules.slowed(rows.rung))}
        return [query if name == "near" else call.turn(query, ends[name][0], m, ends[name][1]) for name in names]

    def step(self, call, plan, query, key, value, scale):
        """Return the output (b, 1, h, d) for a single query if only causality hides keys: its parts, in one softmax.

        Near and middle keys are views of the cache, far ones of the rotated keys kept with it.
        """
        (batch, heads, _, size), groups = query.shape, key.shape[1]
        if key.shape[2] > plan.base + 1:  # A static cache has room for more.
            key, value = key[:, :, : plan.base + 1], value[:, :, : plan.base + 1]
        if plan.matrix is None:
            names = [name for name, *_ in plan.parts]
            queries = self.step_queries(call, plan.map, plan.places.rows, plan.rows, plan.scales, names, query)
            queries = torch.cat(queries, -1).float()
        else:
            queries = query.float() @ plan.matrix
        # Heads that share a key head are multiplied at once, which is faster.
        queries = (queries * scale).to(query.dtype).view(batch * groups, -1, len(plan.parts) * size)
        value, states = value.flatten(0, 1), []
        for i, (part, low, high) in enumerate(plan.parts):
            if low < high:
                keys, span = key, (1, low, high - low)
                if part == "far":
                    keys = self.far_keys(call, plan, key, plan.rung, high, True)
                states.append(
                    (queries.narrow(2, i * size, size), keys.flatten(0, 1).narrow(*span), value.narrow(*span))
                )
        attend = attend_by_products if query.dtype == torch.float32 and query.device.type == "cpu" else attend_and_merge
        return attend(states).view(batch, 1, heads, size)

    def tiles(self, call, plan, stock, query, key, value, scale):
        """Return the output if only causality hides keys: near and far tiles of each run of queries, in one softmax."""
        (batch, heads, length, size), groups, first = query.shape, key.shape[1], plan.first
        output, key = query.new_empty(batch, length, heads, size), key[:, :, : plan.base + length]
        if first:
            output[:, :first] = stock[:, :first]
        query, rows = scaled(call, query[:, :, first:], plan.scales), plan.rows
        parts, m, slowed = {"near": query}, plan.places.rows, plan.map.slowed(rows.rung)
        if any(end for _, end, _ in plan.stages):
            parts["far"] = turned(call, query, rows.at_far, m, slowed, "far")
        if rows.at_middle is not None:
            parts["middle"] = turned(call, query, rows.at_middle, m, name="middle")
        parts = {name: part.unflatten(1, (groups, -1)) for name, part in parts.items()}
        changed = output[:, first:].transpose(1, 2)
        total = changed if changed.dtype == torch.float32 else torch.empty_like(changed, dtype=torch.float32)
        total, sums = total.unflatten(1, (groups, -1)), total.new_empty(*total.shape[:3]).unflatten(1, (groups, -1))
        origin, done, bands = plan.base + first, 0, {}  # Queries before `done` have a result, by the tiles so far.
        for rung, end, tiles in plan.stages:
            far_key = self.far_keys(call, plan, key, rung, end, plan.base and rung == plan.stages[-1][0])
            for part, start, stop, low, high, form in tiles:
                if form == "band" and (stop - start, high - low) not in bands:
                    bands[stop - start, high - low] = band(stop - start, high - low, query, heads // groups)
                bias = bands[stop - start, high - low] if form == "band" else None
                span, keys = slice(start - origin, stop - origin), far_key if part == "far" else key
                for i in range(batch):
                    tile = (parts[part][i, :, :, span], keys[i, :, low:high], value[i, :, low:high])
                    more = attend_tile(*tile, form, bias, scale)
                    merge(total[i, :, :, span], sums[i, :, :, span], *more, start >= done)
                done = max(done, stop)
        if changed.dtype != torch.float32:
            changed.copy_(total.flatten(1, 2))
        return output

    def far_keys(self, call, plan, key, rung, end, is_last):
        """Return keys (b, g, at least `end`, d), rotated as far keys of a level; a cache keeps those of the last."""
        if not plan.map.turns_keys or rung == 0 or end == 0:
            return key
        is_kept = is_last and self.settings.get("side_cache", True) and can_keep(call)
        side = side_of(call, key, rung, 0) if is_kept else None
        start = side.filled if side else 0
        if start < end:
            end = key.shape[2] if side else end  # Keys that are near now are far for later queries.
            if end == start + 1 and call.rotates_heads_alike:
                matrix = self.key_matrix(call, plan.map, key, start, rung)
                far_key = (key[:, :, start:end].float() @ matrix).to(key.dtype)
            else:
                far_key = self.turned_keys(call, plan.map, key[:, :, start:end], start, rung, None if side else "keys")
            if not side:
                return far_key
            side.buffer[:, :, start:end] = far_key
            keep_side(call, side._replace(filled=end))
        return side.buffer

    def turned_keys(self, call, rules, key, start, rung, name=None):
        """Return keys (b, g, n, d) from number `start` on, rotated as far keys of a level."""
        n = torch.arange(start, start + key.shape[2], device=key.device)[None]
        rungs = torch.tensor([[rung]], device=key.device)
        return turned(call, key, rules.keys(n, n, rungs), n, rules.slowed(rungs), name)

    def key_matrix(self, call, rules, key, number, rung):
        """Return the matrix (d, d) that rotates a key as a far key of a level, computed for several keys at once."""
        name = (self.name, id(rules), "key matrix", number, rung, key.device)
        if name not in call.memory:
            size, start = key.shape[3], number // AHEAD * AHEAD
            call.memory[name] = self.kept_for(
                call,
                (id(rules), "keys", size, key.device),
                (start, rung),
                lambda: self.turned_keys(call, rules, vectors(size, key.device), start, rung)[0].transpose(0, 1),
            )[number - start]
        return call.memory[name]

    def blocks(self, call, plan, query, key, value, mask, kwargs):
        """Return output (b, l, h, d) and weights, or None, of all queries from the plan's first on, block by block."""
        results, by_rung = [], {}
        n, rotated = plan.places.keys, plan.places.rotated_keys
        for block in plan.blocks:
            by_rung = {id(rung): by_rung.get(id(rung)) for rung in block.rungs}
            for rung in block.rungs if plan.map.turns_keys else ():
                if by_rung[id(rung)] is None:
                    at, slowed = plan.map.keys(n, rotated, rung), plan.map.slowed(rung)
                    by_rung[id(rung)] = turned(call, key, at, rotated, slowed)
            far = [key if by_rung[id(rung)] is None else by_rung[id(rung)] for rung in block.rungs]
            inputs = call, plan, (block, mask, kwargs), query, key, value, *far
            if torch.is_grad_enabled() and query.requires_grad and not torch.compiler.is_compiling():
                results.append(checkpoint(self.block, *inputs, use_reentrant=False))  # Scores are not kept.
            else:
                results.append(self.block(*inputs))
        outputs, weights = zip(*results, strict=True)
        return torch.cat(outputs, 1), None if weights[0] is None else torch.cat(weights, 2)

    def block(self, call, plan, masked_block, query, key, value, *far_keys):
        """Return output (b, l, h, d) and weights (b, h, l, n), or None, of the queries of a block.

        `masked_block` is the block, its mask and the arguments of the attention.
        """
        block, mask, kwargs = masked_block
        start, stop, low, high, end, rungs = block
        rows = Beyond(*(x if x is None else x[:, start:stop] for x in plan.rows))
        scales = [scale if scale is None else scale[:, start:stop] for scale in plan.scales]
        query, rotated = scaled(call, query[:, :, start:stop], scales), plan.places.rotated[:, start:stop]
        far_query = turned(call, query, rows.at_far, rotated, plan.map.slowed(rows.rung))
        far = product(far_query, far_keys[0][:, :, :high].mT)
        for rung, keys in zip(rungs[1:], far_keys[1:], strict=True):
            far = torch.where((rows.rung == rung)[:, None, :, None], product(far_query, keys[:, :, :high].mT), far)
        near, n = product(query, key[:, :, low:end].mT), plan.places.keys[:, None, :end]
        is_near = (n[..., low:high] >= rows.near[..., None])[:, None]
        mixed = torch.where(is_near, near[..., : high - low], far[..., low:])
        if rows.at_middle is not None:
            middle = product(turned(call, query, rows.at_middle, rotated), key[:, :, low:high].mT)
            is_middle = (n[..., low:high] >= rows.middle[..., None]) & (n[..., low:high] < rows.near[..., None])
            mixed = torch.where(is_middle[:, None], middle, mixed)
        scores = torch.cat([far[..., :low], mixed, near[..., high - low :]], -1) * scaling(call, query, kwargs)
        hidden = (n >= rows.far[..., None]) & (n < rows.middle[..., None]) if plan.map.drops_keys else None
        kwargs = taken(call, kwargs)
        output, weights = softmaxed(scores, value[:, :, :end], mask, (start, stop), plan.base, hidden, kwargs)
        if call.backend != "eager":
            return output, None
        return output, torch.nn.functional.pad(weights, (0, key.shape[2] - end))


def trains(*tensors):
    """Return whether results computed from these tensors need gradients."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def vectors(size, device):
    """Return each unit vector as a head of `AHEAD` positions: (1, d, l, d)."""
    return torch.eye(size, device=device)[None, :, None].expand(-1, -1, AHEAD, -1)


def scales_of(rules, m):
    """Return the factors on queries at m: on the whole query, and on its rotary part."""
    return rules.temperature(m), rules.loudness(m)


def is_tiled(call, query, value, total, kwargs):
    """Return whether tiles can compute this call."""
    special = any(kwargs.get(name) for name in ("dropout", "softcap", "output_attentions"))
    special = special or kwargs.get("s_aux") is not None or 0 < (kwargs.get("sliding_window") or 0) < total
    has_shapes = (call.backend == "sdpa" or call.is_left_to_engine) and query.shape[3] == value.shape[3]
    return has_shapes and not special and operator(query.device.type, query.dtype) is not None


def block_pieces(rows, keys, mask, base, first):
    """Return the Blocks of the query positions from number `first` on."""
    (length, total), shared, blocks = (rows.near.shape[1], keys.shape[1]), {}, []
    is_steady, rungs = bool((keys.diff() == 1).all()), rows.rung.cpu()
    low, high = ((border - keys[:, :1]).cpu() for border in (rows.far, rows.near))
    for start in range(first, length, BLOCK):
        stop = min(start + BLOCK, length)
        by_text = [row[start:stop].unique().tolist() for row in rungs]
        count = max(map(len, by_text))
        together = [tuple(values[min(i, len(values) - 1)] for values in by_text) for i in range(count)]
        tensors = [shared.setdefault(values, torch.tensor(values, device=keys.device)[:, None]) for values in together]
        if isinstance(mask, torch.Tensor) and mask.ndim == 4:
            seen = mask[:, :, start:stop, :total]
            seen = seen if seen.dtype == torch.bool else seen > torch.finfo(seen.dtype).min / 2
            end = int(seen.any(2).flatten(0, 1).any(0).nonzero().amax()) + 1
        else:
            end = total if hasattr(mask, "mask_mod") else min(base + stop, total)
        borders = (int(low[:, start:stop].amin()), int(high[:, start:stop].amax())) if is_steady else (0, end)
        blocks.append(Block(start, stop, *(min(max(border, 0), end) for border in borders), end, tensors))
    return blocks
