"""Attention by relation maps: each query reads near and far keys, at distances that depend on its position.

This file is copied into checkpoints. Queries and keys arrive rotated by their positions, and keys are cached like that.
For far pairs they are rotated further, to the positions of the map (`relation_maps`). Queries that the map does not
change are computed by the inner attention, bit-equal to the source model. The others are computed in one of four forms,
which have the same result:

- `Tiles`: several queries, if only causality hides keys. Tiles are merged by their log-sum-exp.
- `Step`: a single query, if only causality hides keys. One softmax over near and far keys, which are not copied.
- `SingleQuery`: a single query with a mask. One call of the inner attention.
- `Blocks`: anything else. Blocks of queries with one softmax each.

In names, `rows` are query positions. Shapes: b batch, h heads, g key heads, l queries, n keys, d head.
"""

from collections import namedtuple

import torch
from torch.utils.checkpoint import checkpoint

from .method import Method, state_of
from .relation_maps import Beyond, stages
from .relation_parts import (
    Places,
    apply_softmax,
    attend_and_merge,
    attend_by_products,
    attend_tile,
    backend_arguments,
    band,
    begins_again,
    can_keep,
    first_base,
    is_exporting,
    join_outputs,
    keep_side,
    merge,
    next_position,
    operator,
    places_of,
    plain_base,
    product,
    remove_hole,
    rotate_in_pieces,
    scale_query,
    scaling,
    serve,
    served_rows,
    side_of,
)

BLOCK = 128  # Number of queries with scores in memory at once.
AHEAD = 16  # Number of decode steps with rotations that are computed at once, so that most steps compute none.
MAX_LEVELS = 64  # Maximum number of levels of a traced call, which computes each of them for all queries.
# The plan of a call, one class for each form, which layers with the same mask and map share. `map`: the map; `places`:
# positions of queries and keys; `rows`, `scales`: the map's values for queries; `base`: the number of keys before the
# first query; `first`: the first query that changes; `served`: the number of queries that the inner attention computes.
Unchanged = namedtuple("Unchanged", [])  # No query changes: only the inner attention.
# A single query in one call of the inner attention. Keys below `low` stay far for later queries while `levels` and
# `origins` are the same; `levels` is None if no rotated keys are stored. Keys between the two borders of `hole` are
# not read.
SingleQuery = namedtuple("SingleQuery", ["map", "places", "rows", "scales", "low", "levels", "origins", "hole"])
# A single query with far, middle and near keys: its level, its `parts` (name, first key, end), and the `matrix`
# (d, parts * d) that scales and rotates it for each part. If heads rotate differently, it is None, and `rows` and
# `scales` are set.
Step = namedtuple("Step", ["map", "places", "rows", "scales", "base", "level", "parts", "matrix"])
Tiles = namedtuple("Tiles", ["map", "places", "rows", "scales", "base", "first", "served", "stages"])
Blocks = namedtuple("Blocks", ["map", "places", "rows", "scales", "base", "first", "served", "blocks"])
# Queries `start` to `stop`: for all of them, keys below `low` are far, from `high` on near, and from `end` on hidden.
# Each of `levels` is a tensor (b or 1, 1), with one level for each sequence of the batch.
Block = namedtuple("Block", ["start", "stop", "low", "high", "end", "levels"])


class Relation(Method):
    """Base class of attention by a map. Subclasses set `name` and `map_class`, or override `map_of`."""

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
        if not call.is_left_to_engine:  # An engine calls this method for one sequence at a time.
            call.needs_sequences(self.name)
            call.needs_causality(self.name, kwargs.get("is_causal"))
        plan = self.plan(call, self.maps.get(call.layer, self.map), query, key, value, mask, kwargs)
        if isinstance(plan, Unchanged):
            return inner(query, key, value, mask, **kwargs)
        if isinstance(plan, SingleQuery):
            return inner(*self.move_to_map(call, plan, query, key, value, mask), **kwargs)
        if isinstance(plan, Step):
            return self.step(call, plan, query, key, value, scaling(call, query, kwargs)), None
        unchanged = None, None
        if plan.served:
            unchanged = serve(inner, plan.served, plan.base, query, key, value, mask, kwargs)
        if isinstance(plan, Tiles):
            return self.tiles(call, plan, unchanged[0], query, key, value, scaling(call, query, kwargs)), None
        mapped = self.blocks(call, plan, query, key, value, mask, kwargs)
        return join_outputs(plan.places.rows >= plan.map.first, plan, unchanged, mapped)

    def plan(self, call, rules, query, key, value, mask, kwargs):
        """Return the plan of this call by a map. Without tracing, it is computed once per forward for all layers."""
        if torch.compiler.is_compiling():
            return self.traced_plan(call, rules, query, key, mask)
        # Reentrant checkpointing calls twice: without gradients, then with them, which tiles do not support.
        has_gradients = need_gradients(query, key, value)
        name = self.name, id(rules), id(mask), query.shape[2], key.shape[2], query.device, has_gradients
        if name not in call.memory:
            m = next_position(call, key, mask) if query.shape[2] == 1 else None
            plan = self.next_plan(call, rules, m, query, key, value, kwargs) if m is not None else None
            if plan is None:
                plan = self.cheapest_plan(call, rules, query, key, value, mask, kwargs)
            # The mask is stored because its id is in the name: the id of a freed mask may belong to another one.
            call.memory[name] = plan, mask
        return call.memory[name][0]

    def traced_plan(self, call, rules, query, key, mask):
        """Return a plan that does not read positions, because reading them would break the graph.

        Several queries are computed by the inner attention and by blocks with all levels, and then selected.

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
            return SingleQuery(rules, places, rows, scales, 0, None, None, ())
        target = self.settings.get("target_length", rules.length)
        last = rules.last_level(target if is_exporting() else max(target, total))
        message = f"{self.name}: a position is beyond the target length {target}, for which this graph was recorded."
        beyond = rows.level > last  # The graph has no keys for their level.
        torch._assert_async(~beyond.any(), message)
        first = int(rules.first == rules.start)
        if last - first >= MAX_LEVELS:
            raise ValueError(
                f"{self.name}: {last + 1 - first} levels of far keys, which a compiled call computes for every query; "
                f"at most {MAX_LEVELS} are possible. Run it without torch.compile, or for a shorter target length."
            )
        levels = [torch.full_like(places.rows[:, :1], level) for level in range(first, last + 1)]
        if is_exporting():  # Other formats drop assertions, so queries beyond the levels also become NaN.
            query.masked_fill_(beyond[:, None, :, None], torch.nan)
            spans = [(0, length)]  # The length is a symbol, so it cannot be divided into blocks.
        else:
            spans = [(start, min(start + BLOCK, length)) for start in range(0, length, BLOCK)]
        blocks = [Block(*span, 0, total, total, levels) for span in spans]
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
            return Unchanged()
        if begins_again(m, mask, base):
            raise ValueError(
                f"{self.name}: positions restart within a sequence, but no mask separates the texts. Without a cache "
                "and an attention_mask, transformers creates one: pass use_cache=False and no mask, or a 4D mask."
            )
        changed = m >= rules.first
        first = int(changed.any(0).long().argmax())
        # Sequences of a batch change at different queries. The inner attention computes all up to the last unchanged.
        served = 0 if bool(changed.all()) else int((~changed).any(0).nonzero().amax()) + 1
        served = served_rows(call.backend, served, length, mask)
        plain = plain_base(places, mask, total, base)
        start, has_gradients = int(m[0, first]), need_gradients(query, key, value)
        if not has_gradients and plain == start - first and is_tiled(call, query, value, total, kwargs):
            if length == 1:
                if plain == total - 1 and can_keep(call):  # `next_position` then recognizes the next step by its count.
                    state_of(call.cache).common["counted"] = total
                return self.step_plan(call, rules, start, query)
            m = m[:1, first:]
            rows, scales, places = rules.rows(m, m), scales_of(rules, m), Places(m, m, None, None)
            to_do = stages(rules, start, start + length - first)
            return Tiles(rules, places, rows, scales, plain, first, served, to_do)
        rows, scales = rules.rows(m, places.rotated), scales_of(rules, m)
        if length == 1 and (not rules.drops_keys or plain is not None or getattr(mask, "ndim", 0) == 4):
            return self.plan_single_query(rules, places, rows, scales, plain, len(key), has_gradients)
        blocks = block_pieces(rows, places.keys, mask, base, first)
        return Blocks(rules, places, rows, scales, base, first, served, blocks)

    def plan_single_query(self, rules, places, rows, scales, plain, batch, trains):
        """Return the plan of one call for a single query."""
        keys = places.keys
        # Sequences with equal levels and first positions have the same rotated keys at the same places.
        levels, origins = rows.level.expand(batch, 1), keys[:, :1].expand(batch, 1)
        if rules.drops_keys:
            hole = [int(border[0, 0] - origins[0, 0]) for border in (rows.far, rows.near)] if plain is not None else ()
            return SingleQuery(rules, places, rows, scales, 0, None, None, hole)
        is_kept = self.settings.get("side_cache", True) and not trains
        is_far = keys < rows.far  # Counted up to the first that is not far, because padding has arbitrary positions.
        low = int(is_far.long().cumprod(-1).sum(-1).amin())
        levels, origins = levels[:, 0].tolist(), origins[:, 0].tolist()
        if len({*zip(levels, origins, strict=True)}) == 1:
            levels, origins = levels[0], origins[0]
        return SingleQuery(rules, places, rows, scales, low, levels if is_kept else None, origins, ())

    def move_to_map(self, call, plan, query, key, value, mask):
        """Return query, key, value and mask of one call that reads every key at the map's distance.

        The call has one query, at one position: that for far keys. So near keys are rotated too, to keep their distance
        to it. If the map does not rotate far keys, the query stays, and far keys are rotated instead.
        """
        rows, total = plan.rows, key.shape[2]
        query, places = scale_query(call, query, plan.scales), plan.places
        n, rotated = places.keys, places.rotated
        if (
            plan.hole
        ):  # Only the first keys are rotated: they are few, and the query keeps its distance to the last ones.
            first = call.turn(key[:, :, : plan.hole[0]], rotated, rows.at_far)
            key = torch.cat([first, key[:, :, plan.hole[1] :]], 2)
            mask = mask if mask is None else remove_hole(mask[..., :total], plan.hole, -1)
            return query, key, remove_hole(value, plan.hole, 2), mask
        if plan.map.drops_keys:
            hidden = ((n >= rows.far) & (n < rows.near))[:, None, None]
            mask = mask[..., :total]
            mask = mask & ~hidden if mask.dtype == torch.bool else mask.masked_fill(hidden, torch.finfo(mask.dtype).min)
        side = side_of(call, key, plan.levels, plan.origins) if plan.levels is not None and can_keep(call) else None
        start = min(side.filled, plan.low) if side else 0
        slowed = plan.map.frequency_factors(rows.level)
        key = rotate_in_pieces(call, key[:, :, start:], *self.ends(plan, start), slowed)
        if side:  # Near keys are stored as well, but rotated again at the next query, at another position.
            side.buffer[:, :, start:total] = key
            keep_side(call, side._replace(filled=min(plan.low, total)))
            key = side.buffer[:, :, :total]
        return (
            rotate_in_pieces(call, query, rows.at_far, rotated, slowed) if plan.map.rotates_keys else query,
            key,
            value,
            mask,
        )

    def ends(self, plan, start):
        """Return the positions to which keys from index `start` on are rotated for one call, and their current ones."""
        places, rows = plan.places, plan.rows
        n, rotated = places.keys[:, start:], places.rotated_keys[:, start:]
        if (
            plan.map.rotates_keys
        ):  # The query moves to its position for far keys, and other keys by the same difference.
            far, other = (plan.map.keys(n, rotated, rows.level), rotated), (rows.at_far, places.rotated)
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
            return Unchanged()
        if need_gradients(query, key, value):  # The operators of tiles and steps have no gradients.
            return None
        return self.step_plan(call, rules, m, query) if is_tiled(call, query, value, m + 1, kwargs) else None

    def step_plan(self, call, rules, m, query):
        """Return the plan of a step at m. Its inputs are computed for `AHEAD` positions at once and reused."""
        (start, at), size, device = (m // AHEAD * AHEAD, m % AHEAD), query.shape[3], query.device
        rows, scales, borders, matrices = self.kept_for(
            call, (id(rules), size, device), start, lambda: self.ahead(call, rules, start, size, device)
        )
        level, far, middle, near = borders[at]
        parts = ("far", 0, far), ("middle", middle, near), ("near", near, m + 1)
        parts = [part for part in parts if part[0] != "middle" or rows.at_middle is not None]
        if matrices is not None:
            return Step(rules, None, None, None, m, level, parts, matrices[at])
        rows = Beyond(*(x if x is None else x[:, at : at + 1] for x in rows))
        scales = tuple(x if x is None else x[:, at : at + 1] for x in scales)
        places = Places(torch.full((1, 1), m, device=device), None, None, None)
        return Step(rules, places, rows, scales, m, level, parts, None)

    def ahead(self, call, rules, start, size, device):
        """Return the Beyond, scales, borders and matrices of the next `AHEAD` steps from position `start` on."""
        m = torch.arange(start, start + AHEAD, device=device)[None]
        rows, scales, matrices = rules.rows(m, m), scales_of(rules, m), None
        borders = torch.stack([rows.level, rows.far, rows.middle, rows.near], -1)[0].tolist()
        if call.rotates_heads_alike:
            # Rotating all unit vectors results in a matrix. Multiplying by it is faster at each step than rotating.
            names = ["far", "near"] if rows.at_middle is None else ["far", "middle", "near"]
            queries = self.step_queries(call, rules, m, rows, scales, names, unit_vectors(size, device))
            matrices = torch.cat(queries, -1)[0].transpose(0, 1).contiguous()
        return rows, scales, borders, matrices

    def kept_for(self, call, name, number, compute):
        """Return a computed result, which is reused until the number or the frequencies change (dynamic, LongRoPE)."""
        inverse = call.tables.frame.inverse
        kept = self.kept.get(name)
        if kept is None or kept[0] != number or not torch.equal(kept[1], inverse):
            kept = self.kept[name] = number, inverse.clone(), compute()
        return kept[2]

    def step_queries(self, call, rules, m, rows, scales, names, query):
        """Return the queries (b, h, l, d) at m, scaled and rotated for each of their parts."""
        query = scale_query(call, query, scales)
        ends = {"middle": (rows.at_middle, None), "far": (rows.at_far, rules.frequency_factors(rows.level))}
        return [query if name == "near" else call.turn(query, ends[name][0], m, ends[name][1]) for name in names]

    def step(self, call, plan, query, key, value, scale):
        """Return the output (b, 1, h, d) for a single query if only causality hides keys: one softmax over its parts.

        Near and middle keys are views of the cache, far keys views of the rotated keys stored with it, so that no step
        copies keys.
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
                    keys = self.far_keys(call, plan, key, plan.level, high, True)
                states.append(
                    (queries.narrow(2, i * size, size), keys.flatten(0, 1).narrow(*span), value.narrow(*span))
                )
        # In half precision, products would be rounded before the softmax; the operator does not round them.
        attend = attend_by_products if query.dtype == torch.float32 and query.device.type == "cpu" else attend_and_merge
        return attend(states).view(batch, 1, heads, size)

    def tiles(self, call, plan, unchanged, query, key, value, scale):
        """Return the output (b, l, h, d) if only causality hides keys, from tiles of near, middle and far keys."""
        (batch, heads, length, size), groups, first = query.shape, key.shape[1], plan.first
        output, key = query.new_empty(batch, length, heads, size), key[:, :, : plan.base + length]
        if first:
            output[:, :first] = unchanged[:, :first]
        query, rows = scale_query(call, query[:, :, first:], plan.scales), plan.rows
        parts, m, slowed = {"near": query}, plan.places.rows, plan.map.frequency_factors(rows.level)
        if any(end for _, end, _ in plan.stages):
            parts["far"] = rotate_in_pieces(call, query, rows.at_far, m, slowed, "far")
        if rows.at_middle is not None:
            parts["middle"] = rotate_in_pieces(call, query, rows.at_middle, m, name="middle")
        parts = {name: part.unflatten(1, (groups, -1)) for name, part in parts.items()}
        changed = output[:, first:].transpose(1, 2)
        # Halves are merged in float32, because each merge would round them.
        total = changed if changed.dtype == torch.float32 else torch.empty_like(changed, dtype=torch.float32)
        total, sums = total.unflatten(1, (groups, -1)), total.new_empty(*total.shape[:3]).unflatten(1, (groups, -1))
        # Queries before `done` have a result of earlier tiles, with which the next ones are merged.
        origin, done, bands = plan.base + first, 0, {}
        for level, end, tiles in plan.stages:
            far_key = self.far_keys(call, plan, key, level, end, plan.base and level == plan.stages[-1][0])
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

    def far_keys(self, call, plan, key, level, end, is_last):
        """Return keys (b, g, at least `end`, d), rotated as far keys of a level. A cache stores those of the last."""
        if not plan.map.rotates_keys or level == 0 or end == 0:
            return key
        is_kept = is_last and self.settings.get("side_cache", True) and can_keep(call)
        side = side_of(call, key, level, 0) if is_kept else None
        start = side.filled if side else 0
        if start < end:
            end = key.shape[2] if side else end  # Near keys are rotated too, because they are far for later queries.
            if end == start + 1 and call.rotates_heads_alike:
                matrix = self.key_matrix(call, plan.map, key, start, level)
                far_key = (key[:, :, start:end].float() @ matrix).to(key.dtype)
            else:
                far_key = self.rotate_far_keys(
                    call, plan.map, key[:, :, start:end], start, level, None if side else "keys"
                )
            if not side:
                return far_key
            side.buffer[:, :, start:end] = far_key
            keep_side(call, side._replace(filled=end))
        return side.buffer

    def rotate_far_keys(self, call, rules, key, start, level, name=None):
        """Return keys (b, g, n, d) from index `start` on, rotated as far keys of a level."""
        n = torch.arange(start, start + key.shape[2], device=key.device)[None]
        levels = torch.tensor([[level]], device=key.device)
        return rotate_in_pieces(call, key, rules.keys(n, n, levels), n, rules.frequency_factors(levels), name)

    def key_matrix(self, call, rules, key, number, level):
        """Return the matrix (d, d) that rotates a key as a far key of a level, computed for `AHEAD` keys at once."""
        name = (self.name, id(rules), "key matrix", number, level, key.device)
        if name not in call.memory:
            size, start = key.shape[3], number // AHEAD * AHEAD
            call.memory[name] = self.kept_for(
                call,
                (id(rules), "keys", size, key.device),
                (start, level),
                lambda: self.rotate_far_keys(call, rules, unit_vectors(size, key.device), start, level)[0].transpose(
                    0, 1
                ),
            )[number - start]
        return call.memory[name]

    def blocks(self, call, plan, query, key, value, mask, kwargs):
        """Return the output (b, l, h, d) and weights, or None, of all queries from the plan's first on, by blocks."""
        results, by_level = [], {}
        n, rotated = plan.places.keys, plan.places.rotated_keys
        for block in plan.blocks:
            # Rotated keys of levels that do not occur in this block are freed. Levels ascend with the position.
            by_level = {id(level): by_level.get(id(level)) for level in block.levels}
            for level in block.levels if plan.map.rotates_keys else ():
                if by_level[id(level)] is None:
                    at, slowed = plan.map.keys(n, rotated, level), plan.map.frequency_factors(level)
                    by_level[id(level)] = rotate_in_pieces(call, key, at, rotated, slowed)
            far = [key if by_level[id(level)] is None else by_level[id(level)] for level in block.levels]
            inputs = call, plan, (block, mask, kwargs), query, key, value, *far
            if torch.is_grad_enabled() and query.requires_grad and not torch.compiler.is_compiling():
                results.append(checkpoint(self.block, *inputs, use_reentrant=False))  # Scores are not stored.
            else:
                results.append(self.block(*inputs))
        outputs, weights = zip(*results, strict=True)
        return torch.cat(outputs, 1), None if weights[0] is None else torch.cat(weights, 2)

    def block(self, call, plan, masked_block, query, key, value, *far_keys):
        """Return output (b, l, h, d) and weights (b, h, l, n), or None, of the queries of a block.

        `masked_block` is the block, its mask and the arguments of the attention.
        """
        block, mask, kwargs = masked_block
        start, stop, low, high, end, levels = block
        rows = Beyond(*(x if x is None else x[:, start:stop] for x in plan.rows))
        scales = [scale if scale is None else scale[:, start:stop] for scale in plan.scales]
        query, rotated = scale_query(call, query[:, :, start:stop], scales), plan.places.rotated[:, start:stop]
        far_query = rotate_in_pieces(call, query, rows.at_far, rotated, plan.map.frequency_factors(rows.level))
        far = product(far_query, far_keys[0][:, :, :high].mT)
        for level, keys in zip(levels[1:], far_keys[1:], strict=True):
            far = torch.where((rows.level == level)[:, None, :, None], product(far_query, keys[:, :, :high].mT), far)
        # Keys below `low` are far for all queries of the block, keys from `high` on near. Others need both products.
        near, n = product(query, key[:, :, low:end].mT), plan.places.keys[:, None, :end]
        is_near = (n[..., low:high] >= rows.near[..., None])[:, None]
        mixed = torch.where(is_near, near[..., : high - low], far[..., low:])
        if rows.at_middle is not None:
            middle = product(rotate_in_pieces(call, query, rows.at_middle, rotated), key[:, :, low:high].mT)
            is_middle = (n[..., low:high] >= rows.middle[..., None]) & (n[..., low:high] < rows.near[..., None])
            mixed = torch.where(is_middle[:, None], middle, mixed)
        scores = torch.cat([far[..., :low], mixed, near[..., high - low :]], -1) * scaling(call, query, kwargs)
        hidden = (n >= rows.far[..., None]) & (n < rows.middle[..., None]) if plan.map.drops_keys else None
        kwargs = backend_arguments(call, kwargs)
        output, weights = apply_softmax(scores, value[:, :, :end], mask, (start, stop), plan.base, hidden, kwargs)
        if call.backend != "eager":
            return output, None
        return output, torch.nn.functional.pad(weights, (0, key.shape[2] - end))


def need_gradients(*tensors):
    """Return whether results computed from these tensors need gradients."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def unit_vectors(size, device):
    """Return each unit vector as a head of `AHEAD` positions: (1, d, l, d)."""
    return torch.eye(size, device=device)[None, :, None].expand(-1, -1, AHEAD, -1)


def scales_of(rules, m):
    """Return the factors on queries at m: on the whole query, and on its rotary part."""
    return rules.temperature(m), rules.rotary_temperature(m)


def is_tiled(call, query, value, total, kwargs):
    """Return whether tiles can compute this call."""
    special = any(kwargs.get(name) for name in ("dropout", "softcap", "output_attentions"))
    special = special or kwargs.get("s_aux") is not None or 0 < (kwargs.get("sliding_window") or 0) < total
    has_shapes = (call.backend == "sdpa" or call.is_left_to_engine) and query.shape[3] == value.shape[3]
    return has_shapes and not special and operator(query.device.type, query.dtype) is not None


def block_pieces(rows, keys, mask, base, first):
    """Return the Blocks of the query positions from number `first` on."""
    (length, total), shared, blocks = (rows.near.shape[1], keys.shape[1]), {}, []
    is_steady, levels = bool((keys.diff() == 1).all()), rows.level.cpu()
    low, high = ((border - keys[:, :1]).cpu() for border in (rows.far, rows.near))
    for start in range(first, length, BLOCK):
        stop = min(start + BLOCK, length)
        by_text = [row[start:stop].unique().tolist() for row in levels]
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
