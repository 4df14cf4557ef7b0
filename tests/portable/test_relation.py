"""Relation maps: each method against loops in float64, in every form that its attention takes.

The loops ask the method's reference pair by pair: `relation` says for a query at m and a key at n by which angles each
is rotated from scratch, or that the key is not read; `temperature` what the row's scores are multiplied by.
"""

import functools
import shutil
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from ctxext.portable import method as seam
from ctxext.portable.method import state_of
from ctxext.portable.mspoe import MsPoE
from ctxext.portable.relation import Blocks, Relation, SingleQuery, Step, Tiles, Unchanged
from ctxext.portable.relation_parts import begins_again
from ctxext.portable.rerope import Rerope, ReRopeMap
from ctxext.recipes.methods.self_extend import SelfExtend
from ctxext.recipes.registry import method_named
from ctxext.verify.rotation import reference_of
from portable_checkpoints import llama, load, write
from relation_cases import (
    BASE,
    LENGTH,
    METHODS,
    PAIRS,
    Call,
    FlexMask,
    as_numpy,
    base_rotated,
    made,
    map_of,
    states,
    step,
    stock,
    stock_eager,
)

TOTAL = 300
# At the borders of every map, on both sides.
ROWS = [*(0, 9, 16, 17, 20, 21, 22, 23, 40, 47, 48), *range(61, 68), *(90, 95, 96, 112, 127, 128, 129, 150, 172, 173)]
ROWS += [191, 192, 200, 226, 227, 255, 256, 257, 281, 298, 299]
FORMS = Blocks, Unchanged, SingleQuery, Step, Tiles
LAYOUTS = {
    "grouped": {},
    "multi-head": {"heads": 3, "groups": 3},
    "one-key-head": {"heads": 3, "groups": 1},
    "partial": {"size": 24},
    "interleaved": {"interleaved": True},
}


@functools.cache
def reference_named(name):
    return reference_of(method_named(name))


def relation(step, layer, m, n, frequencies):
    return reference_named(step["method"]).relation(step, layer, m, n, frequencies)


def temperature(step, layer, m):
    return reference_named(step["method"]).temperature(step, layer, m)


def rotated_factor(step, layer, m):
    factor = getattr(reference_named(step["method"]), "rotated_factor", None)
    return 1.0 if factor is None else factor(step, layer, m)


def rotate(vectors, angles, interleaved=False):
    """Rotate the first 2 p entries of vectors (..., d) by angles (p,) or (..., p)."""
    size = 2 * np.shape(angles)[-1]
    first, second = (
        (slice(0, size, 2), slice(1, size, 2)) if interleaved else (slice(size // 2), slice(size // 2, size))
    )
    cos, sin = np.cos(angles), np.sin(angles)
    out = np.array(np.broadcast_to(vectors, (*np.shape(angles)[:-1], vectors.shape[-1])), dtype=np.float64)
    a, b = vectors[..., first], vectors[..., second]
    out[..., first], out[..., second] = a * cos - b * sin, b * cos + a * sin
    return out


def attention(step, query, key, value, positions, inverse, *, scaling, seen=None, interleaved=False, rows=None):
    """Output (h, l, d) of un-rotated query (h, l, d), key and value (g, l, d), rows and keys at the same positions.

    `seen(i, j)` says whether row i may see key j; without it every earlier one. `rows`: only these are computed.
    """
    heads, groups, length = len(query), len(key), len(positions)
    out = np.zeros((heads, length, value.shape[-1]))
    for i in range(length) if rows is None else rows:
        pairs = {}
        for j in range(i + 1):
            angles = relation(step, 0, positions[i], positions[j], inverse) if seen is None or seen(i, j) else None
            if angles is not None:
                pairs[j] = angles
        read, (of_query, of_key) = [*pairs], (np.array(angles) for angles in zip(*pairs.values(), strict=True))
        for head in range(heads):
            group = head * groups // heads
            products = rotate(query[head, i], of_query, interleaved) * rotate(key[group, read], of_key, interleaved)
            scores = products[:, : 2 * len(inverse)].sum(-1) * rotated_factor(step, 0, positions[i]) ** 2
            scores = (scores + products[:, 2 * len(inverse) :].sum(-1)) * scaling * temperature(step, 0, positions[i])
            weights = np.exp(scores - scores.max())
            out[head, i] = weights / weights.sum() @ value[group, read]
    return out


@functools.cache
def case(name, layout="grouped", total=TOTAL):
    """Rotated query and key, value, and what loops say, for the rows that are compared."""
    options = dict(LAYOUTS[layout])
    interleaved = options.pop("interleaved", False)
    query, key, value = states(total, **options)
    rows = [row for row in ROWS if row < total]
    positions = list(range(total))
    expected = attention(
        step(name),
        *as_numpy(query[0], key[0], value[0]),
        positions,
        BASE,
        scaling=query.shape[-1] ** -0.5,
        interleaved=interleaved,
        rows=rows,
    )
    query, key = base_rotated(query, key, torch.arange(total)[None], interleaved)
    return query, key, value, torch.from_numpy(expected)[:, rows], rows, interleaved


def close(output, expected, rows):
    """Compare the rows of output (1, l, h, d) with expected (h, rows, d)."""
    torch.testing.assert_close(output[0].transpose(0, 1)[:, rows].double(), expected, rtol=1e-4, atol=1e-4)


def form_of(call):
    """The name of the class of this call's plan."""
    kept = (value[0] for value in call.memory.values() if isinstance(value, tuple))
    return next(type(plan).__name__.lower() for plan in kept if isinstance(plan, FORMS))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", METHODS)
def test_every_form_equals_loops(name, layout):
    query, key, value, expected, rows, interleaved = case(name, layout)
    method, positions = made(name), torch.arange(TOTAL)[None]
    first = map_of(method).first
    for backend, form in (("sdpa", "tiles"), ("other", "blocks")):
        call = Call(positions, backend=backend, interleaved=interleaved)
        output, _ = method.attend(stock, call, query, key, value, None)
        assert form_of(call) == form
        close(output, expected, rows)
        assert torch.equal(output[:, :first], stock(query, key, value, None)[0][:, :first])
    methods = made(name), made(name)  # What one computes ahead is for one way alone.
    for row, out in zip(rows, expected.unbind(1), strict=True):
        for backend in ("sdpa", "other"):
            call = Call(positions[:, row : row + 1], backend=backend, interleaved=interleaved)
            call.rotates_heads_alike = row % 2 == 0  # Or another method rotates them.
            tensors = query[:, :, row : row + 1], key[:, :, : row + 1], value[:, :, : row + 1]
            output, _ = methods[row % 2].attend(stock, call, *tensors, None)
            close(output, out[:, None], [0])
            if row >= first:
                assert form_of(call) == ("step" if backend == "sdpa" else "singlequery")


@pytest.mark.parametrize("size", [16, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("total", [500, 767, 768, 1100, 1700])
def test_a_long_call_leaves_queries_within_the_original_length_unchanged(total, dtype, size):
    """Stock runs on fewer rows than it was given, and how it divides them must not show."""
    query, key, value = (tensor.to(dtype) for tensor in states(total, size=size))
    method = made("window-warm")
    plain = stock(query, key, value, None)[0]
    for first in (64, 100, 511, 513, 600):
        if first < total:
            method.map.first = method.map.start = first
            output, _ = method.attend(stock, Call(torch.arange(total)[None]), query, key, value, None)
            assert torch.equal(output[:, :first], plain[:, :first])


def test_inside_the_window_nothing_is_touched():
    query, key, value = states(LENGTH)
    seen = []
    for name in METHODS:
        method = made(name)
        total = min(map_of(method).first, LENGTH)
        tensors = query[:, :, :total], key[:, :, :total], value[:, :, :total]
        call = Call(torch.arange(total)[None])
        method.attend(
            lambda *args, **kwargs: seen.append((args, kwargs)) or (None, None), call, *tensors, "m", scaling=2
        )
        args, kwargs = seen.pop()
        assert all(a is b for a, b in zip(args, tensors, strict=False))
        assert (args[3], kwargs, call.turns) == ("m", {"scaling": 2}, 0)


def causal_bool(total, padding=(0,)):
    mask = torch.ones(total, total, dtype=torch.bool).tril()
    masks = torch.stack([mask & (torch.arange(total) >= count) for count in padding])[:, None]
    masks[:, :, range(total), range(total)] = True
    return masks


def additive(mask):
    return torch.zeros(mask.shape).masked_fill_(~mask, torch.finfo(torch.float32).min)


def padded(padding, total=TOTAL):
    """Positions (b, l) of left-padded prompts as generate counts them."""
    return torch.stack([(torch.arange(total) - count).where(torch.arange(total) >= count, 1) for count in padding])


@pytest.mark.parametrize("name", METHODS)
def test_left_padding_in_every_kind_of_mask(name):
    """Each prompt of a batch comes out as alone; what is inside its window as in stock, bit by bit."""
    padding, method = [70, 0, 170, 5], made(name)
    query, key, value = states(TOTAL, batch=4)
    positions, mask = padded(padding), causal_bool(TOTAL, padding)
    query, key = base_rotated(query, key, positions)
    plain = stock(query, key, value, mask)[0]
    flash = (torch.arange(TOTAL) >= torch.tensor(padding)[:, None]).long()

    def inner(query, key, value, given, **kwargs):
        return stock(query, key, value, mask[:, :, TOTAL - query.shape[2] :], **kwargs)

    cases = {"sdpa": mask, "eager": additive(mask), "flex_attention": FlexMask(mask), "flash_attention_2": flash}
    for backend, given in cases.items():
        attention = {"sdpa": stock, "eager": stock_eager}.get(backend, inner)
        output, weights = method.attend(attention, Call(positions, backend=backend), query, key, value, given)
        assert (weights is not None) == (backend == "eager")
        stock_output = attention(query, key, value, given)[0]
        for i, count in enumerate(padding):
            inside = slice(count, count + map_of(method).first)
            assert torch.equal(output[i, inside], stock_output[i, inside]), (backend, i)
            alone = [tensor[i : i + 1, :, count:] for tensor in (query, key, value)]
            expected, _ = method.attend(stock, Call(torch.arange(TOTAL - count)[None]), *alone, None)
            torch.testing.assert_close(output[i : i + 1, count:], expected, rtol=1e-4, atol=1e-5)
        if weights is not None:
            torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]))
    assert not torch.allclose(output, plain)


@pytest.mark.parametrize("name", METHODS)
def test_one_row_of_a_padded_batch(name):
    padding, method = [70, 260, 0, 170, 5], made(name)
    query, key, value = states(TOTAL, batch=5)
    positions, mask = padded(padding), causal_bool(TOTAL, padding)
    query, key = base_rotated(query, key, positions)
    last = query[:, :, -1:]
    for given in (mask[:, :, -1:], torch.nn.functional.pad(mask[:, :, -1:], (0, 7))):  # A static cache has more.
        room = given.shape[-1] - TOTAL
        keys, values = (torch.nn.functional.pad(tensor, (0, 0, 0, room), value=9.0) for tensor in (key, value))
        call = Call(positions[:, -1:])
        output, _ = method.attend(stock, call, last, keys, values, given)
        for i, count in enumerate(padding):
            alone = [tensor[i : i + 1, :, count:] for tensor in (query, key, value)]
            expected, _ = method.attend(stock, Call(torch.arange(TOTAL - count)[None]), *alone, None)
            torch.testing.assert_close(output[i : i + 1], expected[:, -1:], rtol=1e-4, atol=1e-5)
            if TOTAL - count <= map_of(method).first and not room:
                assert torch.equal(output[i], stock(last, key, value, given)[0][i])


@pytest.mark.parametrize("name", ["self-extend", "dca", "rerope", "sinks", "adaptive"])
@pytest.mark.parametrize("kind", ["packed", "jumps"])
def test_positions_that_start_again_or_jump(name, kind):
    """Documents packed into one row keep apart by their mask; PoSE skips positions."""
    total, settings, method = 180, step(name), made(name)
    if kind == "packed":
        lengths = [30, 100, 50]
        positions = torch.cat([torch.arange(length) for length in lengths])
        document = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))
        mask = causal_bool(total) & (document[:, None] == document)
    else:
        positions, mask = (
            torch.cat([torch.arange(40), torch.arange(90, 150), torch.arange(190, 270)]),
            causal_bool(total),
        )
        if name == "sinks":
            pytest.skip("Positions within a cache have no jumps in the paper.")
    query, key, value = states(total, heads=2, groups=1)
    rows = [*range(0, total, 7), 129, 130, 179]
    expected = attention(
        settings,
        *as_numpy(query[0], key[0], value[0]),
        positions.tolist(),
        BASE,
        scaling=0.25,
        seen=lambda i, j: bool(mask[0, 0, i, j]),
        rows=rows,
    )
    query, key = base_rotated(query, key, positions[None])
    for given in (mask, additive(mask)):
        call = Call(positions[None], backend="sdpa" if given is mask else "eager")
        output, _ = method.attend(stock if given is mask else stock_eager, call, query, key, value, given)
        assert form_of(call) == "blocks"
        close(output, torch.from_numpy(expected)[:, rows], rows)


@pytest.mark.parametrize("seed", range(40))
def test_positions_that_fall_behind_a_token_begin_again(seed):
    """Without a mask of scores no token may stand before one that was read, in any sequence and behind a cache."""
    draw = torch.Generator().manual_seed(seed)
    length, base = 6, int(torch.randint(4, (1,), generator=draw))
    positions = torch.arange(length).repeat(2, 1)
    at = torch.randint(12, (2,), generator=draw)
    for row, start in enumerate(at):
        positions[row, start:] -= start  # From 6 on nothing falls.
    mask = (torch.rand(2, base + length, generator=draw) < 0.6).long()

    def falls(shown):
        read = [[m for m, is_shown in zip(*row, strict=True) if is_shown] for row in zip(positions, shown, strict=True)]
        return any(row != sorted(row) for row in read)

    assert begins_again(positions, mask, base) == falls(mask[:, base:])
    assert begins_again(positions, None, base) == falls(torch.ones(2, length))
    for hides in (torch.ones(2, 1, length, base + length), FlexMask(torch.ones(2, 1, length, base + length))):
        assert not begins_again(positions, hides, base)


@pytest.mark.parametrize("name", ["self-extend", "adaptive"])
def test_texts_that_begin_again_under_flash_attention_are_refused(name):
    """Its mask is the tokenizer's or none, and neither keeps texts apart; padding between two turns is no new text."""
    method, (query, key, value) = made(name), states(150)
    again, mask = torch.cat([torch.arange(90), torch.arange(60)])[None], torch.ones(1, 150, dtype=torch.long)
    turns = torch.cat([torch.arange(80), torch.ones(10, dtype=torch.long), torch.arange(80, 140)])[None]
    padding = (torch.arange(150) >= 80) & (torch.arange(150) < 90)[None]

    def inner(query, key, value, given, **kwargs):
        seen = causal_bool(150) & (given[:, None, None] != 0) | torch.eye(150, dtype=torch.bool)
        return stock(query, key, value, seen[:, :, : query.shape[2]])

    def attend(positions, given):
        call, rotated = Call(positions, backend="flash_attention_2"), base_rotated(query, key, positions)
        return method.attend(inner, call, *rotated, value, given)[0]

    for given in (None, mask, mask.index_fill(1, torch.tensor([5]), 0)):
        with pytest.raises(ValueError, match="positions restart within a sequence"):
            attend(again, given)
    shown = ~padding
    places, alone = torch.arange(140)[None], [tensor[:, :, shown[0]] for tensor in (query, key, value)]
    expected = method.attend(stock, Call(places), *base_rotated(*alone[:2], places), alone[2], None)[0]
    torch.testing.assert_close(attend(turns, shown.long())[:, shown[0]], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", METHODS)
def test_gradients(name):
    """Of query, key and value against a dense float64 form of the loops' angles."""
    total, settings, method = 140, step(name), made(name)
    query, key, value = states(total, heads=2, groups=1)
    angles = np.zeros((2, total, total, PAIRS))
    seen = torch.zeros(total, total, dtype=torch.bool)
    for m in range(total):
        for n in range(m + 1):
            pair = relation(settings, 0, m, n, BASE)
            if pair is not None:
                seen[m, n], angles[:, m, n] = True, pair
    apart = torch.from_numpy(angles[0] - angles[1])
    warm = [temperature(settings, 0, m) * rotated_factor(settings, 0, m) ** 2 for m in range(total)]
    warm = torch.tensor(warm).double()
    cotangent = torch.randn(1, total, 2, 16, generator=torch.Generator().manual_seed(3)).double()

    def dense(q, k, v):
        a, b, c, d = *q.chunk(2, -1), *k.chunk(2, -1)
        same = torch.einsum("bhmp,bgnp,mnp->bhmn", a, c, apart.cos()) + torch.einsum(
            "bhmp,bgnp,mnp->bhmn", b, d, apart.cos()
        )
        cross = torch.einsum("bhmp,bgnp,mnp->bhmn", a, d, apart.sin()) - torch.einsum(
            "bhmp,bgnp,mnp->bhmn", b, c, apart.sin()
        )
        scores = (same + cross) * 0.25 * warm[:, None]
        return (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v).transpose(1, 2)

    wide = [tensor.double().requires_grad_() for tensor in (query, key, value)]
    expected = torch.autograd.grad((dense(*wide) * cotangent).sum(), wide)
    own = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
    call = Call(torch.arange(total)[None])
    output, _ = method.attend(stock, call, *base_rotated(own[0], own[1], torch.arange(total)[None]), own[2], None)
    assert form_of(call) == "blocks"
    for gradient, true in zip(torch.autograd.grad((output * cotangent).sum(), own), expected, strict=True):
        torch.testing.assert_close(gradient.double(), true, rtol=1e-3, atol=1e-4)


@pytest.mark.thorough
def test_softcap_sinks_window_and_dropout():
    """What families add to their attention is added to rows beyond the window too."""
    method, total = made("self-extend"), 200
    query, key, value = states(total, batch=2)
    positions, mask = torch.arange(total)[None].expand(2, -1), causal_bool(total)
    own = torch.randn(4, generator=torch.Generator().manual_seed(1))
    # A window so wide that nothing is far: the rows' own code must then equal stock.
    settings = {"method": "rerope", "original_length": 64, "window": 64}
    near = type(made("rerope"))(settings)
    near.map.window = 10**6
    for extra in ({"softcap": 5.0}, {"s_aux": own}, {"softcap": 3.0, "s_aux": own}):
        call = Call(positions, backend="eager")
        output, weights = near.attend(stock_eager, call, query, key, value, additive(mask), scaling=0.25, **extra)
        expected, expected_weights = stock_eager(query, key, value, additive(mask), scaling=0.25, **extra)
        torch.testing.assert_close(output, expected)
        torch.testing.assert_close(weights, expected_weights)
    call = Call(positions, backend="flash_attention_2")
    banded = mask & (torch.arange(total) > torch.arange(total)[:, None] - 50)
    output, _ = near.attend(lambda *a, **k: stock(*a[:3], banded), call, query, key, value, None, sliding_window=50)
    torch.testing.assert_close(output, stock(query, key, value, banded)[0])
    torch.manual_seed(0)
    drawn = [method.attend(stock, Call(positions), query, key, value, None, dropout=0.2)[0] for _ in range(100)]
    kept, _ = method.attend(stock, Call(positions), query, key, value, None)
    assert not torch.equal(drawn[0][:, 150], drawn[1][:, 150])
    torch.testing.assert_close(torch.stack(drawn).mean(0)[:, 150], kept[:, 150], rtol=0, atol=0.25)


@pytest.mark.parametrize("name", METHODS)
def test_bfloat16(name):
    query, key, value, expected, rows, _ = case(name)
    tensors = [tensor.bfloat16() for tensor in (query, key, value)]
    plain = stock(*tensors, None)[0]
    error = (plain.float() - stock(query, key, value, None)[0]).abs().max()
    for backend in ("sdpa", "other"):
        output, _ = made(name).attend(stock, Call(torch.arange(TOTAL)[None], backend=backend), *tensors, None)
        assert output.dtype == torch.bfloat16
        assert (output[0].transpose(0, 1)[:, rows].double() - expected).abs().max() < 3 * error


def test_values_of_another_width():
    method, positions = made("rerope"), torch.arange(200)[None]
    query, key, value = states(200, value_size=12)
    query, key = base_rotated(query, key, positions)
    wide = torch.nn.functional.pad(value, (0, 4))
    output, _ = method.attend(stock, Call(positions), query, key, value, None)
    expected, _ = method.attend(stock, Call(positions), query, key, wide, None)
    torch.testing.assert_close(output, expected[..., :12])


@pytest.mark.parametrize("name", METHODS)
def test_levels_are_known_before_the_call(name):
    """A traced call goes through all levels up to the last."""
    rules = map_of(made(name))
    for total in (1, 64, 65, 128, 200, 300):
        assert int(rules.rows(*[torch.arange(total)[None]] * 2).level.max()) <= rules.last_level(total)


@pytest.mark.parametrize(
    ("length", "name"),
    [
        *((1, "adaptive"), (300, "self-extend"), (300, "dca-short")),
        *(pytest.param(1, name, marks=pytest.mark.slow) for name in ("self-extend", "bifocal", "dca-short", "sinks")),
        *(pytest.param(300, name, marks=pytest.mark.slow) for name in ("bifocal", "sinks", "adaptive")),
    ],
)
@pytest.mark.thorough
def test_compiled_in_one_graph(name, length):
    method, total = made(name), 300
    padding = [40, 0]
    query, key, value = states(total, batch=2)
    positions, mask = padded(padding, total), causal_bool(total, padding)
    query, key = base_rotated(query, key, positions)
    tensors = query[:, :, -length:], key, value

    def run(positions, mask, *tensors):
        return method.attend(stock, Call(positions), *tensors, mask)[0]

    inputs = positions[:, -length:], mask[:, :, -length:], *tensors
    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(run, fullgraph=True, backend="aot_eager")(*inputs)
        torch.testing.assert_close(compiled[:, -80:], run(*inputs)[:, -80:], rtol=1e-4, atol=1e-5)


def test_layers_of_a_forward_may_have_different_maps():
    """They share what a forward remembers, but no plan."""

    class Layered(Relation):
        name = "layered"

        def map_of(self, layer):
            return ReRopeMap({**self.settings, "window": 10 + 20 * layer})

    settings = {"layers": [0, 1], "original_length": LENGTH, "target_length": 256}
    query, key, value = states(200)
    positions, method, memory = torch.arange(200)[None], Layered(settings), {}
    query, key = base_rotated(query, key, positions)
    for layer in (0, 1, 0):
        alone = Rerope({**settings, "window": 10 + 20 * layer})
        wanted, _ = alone.attend(stock, Call(positions, layer), query, key, value, None)
        output, _ = method.attend(stock, Call(positions, layer, memory=memory), query, key, value, None)
        assert torch.equal(output, wanted), layer
        for row in (100, 199):
            call = Call(positions[:, row : row + 1], layer, memory={})
            tensors = query[:, :, row : row + 1], key[:, :, : row + 1], value[:, :, : row + 1]
            torch.testing.assert_close(
                method.attend(stock, call, *tensors, None)[0], wanted[:, row : row + 1], rtol=1e-4, atol=1e-4
            )


@pytest.mark.parametrize("name", ["self-extend", "bifocal"])
def test_a_traced_plan_has_the_levels_of_a_cache_longer_than_the_target(name, monkeypatch):
    method, total = made(name), 300
    tensors = torch.zeros(1, 2, total, 16)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    plan = method.plan(Call(torch.arange(total)[None]), method.map, tensors, tensors, tensors, None, {})
    assert int(plan.rows.level.max()) <= max(int(level.max()) for level in plan.blocks[-1].levels)


def test_a_traced_plan_with_too_many_levels_is_refused(monkeypatch):
    """Each costs a turned copy of the keys, as a traced call cannot read which of them occur."""
    method, tensors = made("self-extend"), torch.zeros(1, 2, 99, 16)
    method.settings["target_length"] = 64 * 54 + 10  # A level for each 54 tokens behind the window of 10.
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    plan = method.plan(Call(torch.arange(99)[None]), method.map, tensors, tensors, tensors, None, {})
    assert len(plan.blocks[-1].levels) == 64
    method.settings["target_length"] += 1
    with pytest.raises(ValueError, match="65 levels of far keys"):
        method.plan(Call(torch.arange(99)[None]), method.map, tensors, tensors, tensors, None, {})


@pytest.mark.parametrize("name", ["self-extend", "bifocal", "dca", "rerope", "adaptive"])
def test_layers_share_the_rotations_of_a_step(name):
    """Only the first layer of a step computes angles, of queries and of keys that become far, for some steps."""
    query, key, value, *_ = case(name)
    method, cache = made(name), DynamicCache()
    for row in (200, 201, 202):
        memory = {}
        tensors = query[:, :, row : row + 1], key[:, :, : row + 1], value[:, :, : row + 1]
        calls = [Call(torch.tensor([[row]]), layer, cache, memory) for layer in range(2)]
        outputs = [method.attend(stock, call, *tensors, None)[0] for call in calls]
        assert torch.equal(*outputs)
        if row > 200:
            assert calls[0].turns <= (16 if row == 201 else 0)
            assert calls[1].turns == 0


def test_heads_rotated_by_a_method_are_not_treated_as_equal():
    alike = seam.Call.rotates_heads_alike.fget
    assert alike(SimpleNamespace(methods=[made("dca")]))
    assert not alike(SimpleNamespace(methods=[made("dca"), MsPoE({})]))


def test_a_cache_is_freed_with_its_last_reference():
    """Not when garbage is next collected: the caches of several long prompts would be in memory at once."""
    cache = DynamicCache()
    state_of(cache)
    alive = weakref.ref(cache)
    del cache
    assert alive() is None


@torch.no_grad()
def test_layers_of_a_loaded_model_share_one_plan(tmp_path, monkeypatch):
    """Positions and masks are read once for all layers, not once in each."""
    llama(tmp_path / "source")
    shutil.copytree(tmp_path / "source", tmp_path / "one_plan")
    network = load(write(tmp_path / "one_plan", SelfExtend(factor=2)))
    method, plans = type(network.model.layers[0].ctxext_part.methods[0]), []
    original = method.cheapest_plan
    monkeypatch.setattr(method, "cheapest_plan", lambda *args: plans.append(original(*args)) or plans[-1])
    ids = torch.randint(1, 64, (1, 300), generator=torch.Generator().manual_seed(0))
    cache = network(ids[:, :299]).past_key_values
    network(ids[:, 299:], past_key_values=cache)
    assert [type(plan).__name__ for plan in plans] == ["Tiles", "Step"]
