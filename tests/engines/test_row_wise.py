"""Relation maps in a stub engine with concatenated requests, and keys in blocks of any order."""

import random
from types import SimpleNamespace

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from ctxext.engines import row_wise as row_wise_module
from ctxext.engines.layout import Layout, RotatedKeys
from ctxext.engines.row_wise import Rows, make_row_wise
from ctxext.portable import modeling_family  # noqa: F401  # A checkpoint's stub imports it.
from ctxext.portable.method import Part
from relation_cases import BASE, LENGTH, METHODS, PAIRS, Call, made, states, stock, stock_eager

TOKENS, BLOCKS, HEADS, GROUPS, SIZE = 16, 64, 4, 2, 2 * PAIRS


class Implementation:
    """An engine's attention that permutes keys and values within a block."""

    def __init__(self):
        self.num_kv_heads, self.head_size, self.scale = GROUPS, SIZE, SIZE**-0.5
        self.order = torch.randperm(2 * TOKENS * GROUPS * SIZE, generator=torch.Generator().manual_seed(3))

    def do_kv_cache_update(self, layer, key, value, cache, slots):
        inside = torch.stack([key, value], 1).flatten(1)
        for slot, numbers in zip(slots.tolist(), inside, strict=True):
            block, token = divmod(slot, TOKENS)
            flat = cache[block].view(-1)
            flat[self.order[token * len(numbers) : (token + 1) * len(numbers)]] = numbers

    def forward(self, layer, query, key, value, cache, about, output):
        output.fill_(7.0)
        return output


class Strided(Implementation):
    """An attention that stores keys by column and values by token, as vLLM does on CPUs."""

    def do_kv_cache_update(self, layer, key, value, cache, slots):
        keys, values = cache.view(len(cache), GROUPS, 2 * TOKENS, SIZE).chunk(2, 2)
        keys = keys.reshape(len(cache), GROUPS, -1).view(len(cache), GROUPS, SIZE, TOKENS)
        for slot, one, other in zip(slots.tolist(), key, value, strict=True):
            block, token = divmod(slot, TOKENS)
            keys[block, :, :, token], values[block, :, token] = one, other
        cache.view(len(cache), GROUPS, 2 * TOKENS, SIZE)[:, :, :TOKENS] = keys.view(len(cache), GROUPS, TOKENS, SIZE)


def rows_of(name, *, keeps_keys=False):
    """Create the rows of a case, with a layer of a converted model."""
    attention = SimpleNamespace(layer_idx=0, scaling=None, config=SimpleNamespace(_attn_implementation="vllm"))
    method = made(name)
    part = Part([method], "self_attn", attention, (apply_rotary_pos_emb, True))
    part.is_left_to_engine = True
    rotary = SimpleNamespace(ctxext_layouts={None: ([*range(PAIRS)] * 2, None)}, inv_freq=torch.tensor(BASE))
    return Rows(part, attention, rotary, [method], 0, keeps_keys=keeps_keys)


def engine_of(name, kind=Implementation, *, keeps_keys=False):
    """Create an engine with the rows of a case, and its cache."""
    engine = kind()
    engine.ctxext_rows = rows_of(name, keeps_keys=keeps_keys)
    engine.__class__ = make_row_wise(kind)
    return engine, torch.full((BLOCKS, GROUPS, TOKENS, 2 * SIZE), torch.nan)  # Left by earlier requests.


def served(name, lengths, chunk, seed=0, on=None, first=0):
    """Return queries, keys and values of requests, and the output of an engine in chunks of `chunk` tokens."""
    engine, cache = on or engine_of(name)
    free = [*range(BLOCKS)]
    random.Random(seed).shuffle(free)
    table = torch.zeros(len(lengths), BLOCKS, dtype=torch.int32)
    for row in table:
        row[: -(-max(lengths) // TOKENS)] = torch.tensor([free.pop() for _ in range(-(-max(lengths) // TOKENS))])
    own = [states(length, HEADS, GROUPS, SIZE, seed=number) for number, length in enumerate(lengths, first)]
    outputs = [[] for _ in lengths]
    done = [0] * len(lengths)
    while any(a < b for a, b in zip(done, lengths, strict=True)):
        counts = [min(chunk, length - start) for start, length in zip(done, lengths, strict=True)]
        spans = [slice(start, start + count) for start, count in zip(done, counts, strict=True)]
        query, key, value = (
            torch.cat([one[i][0, :, span].transpose(0, 1) for one, span in zip(own, spans, strict=True)])
            for i in range(3)
        )
        slots = [
            int(table[number, place // TOKENS]) * TOKENS + place % TOKENS
            for number, span in enumerate(spans)
            for place in range(span.start, span.stop)
        ]
        engine.do_kv_cache_update(None, key, value, cache, torch.tensor(slots))
        done = [start + count for start, count in zip(done, counts, strict=True)]
        about = SimpleNamespace(
            query_start_loc=torch.tensor([0, *counts]).cumsum(0), seq_lens=torch.tensor(done), block_table=table
        )
        output = torch.empty_like(query)
        engine.forward(None, query, key, value, cache, about, output)
        for number, piece in enumerate(output.split(counts)):
            outputs[number].append(piece)
    return own, [torch.cat(pieces).transpose(0, 1) for pieces in outputs], engine.ctxext_rows.first


def check_each(name, own, outputs, first):
    """From the border on, the output for each request equals that of the method for this request alone."""
    for (query, key, value), output in zip(own, outputs, strict=True):
        call = Call(torch.arange(query.shape[2])[None])
        wanted = made(name).attend(stock, call, query, key, value, None)[0][0].transpose(0, 1)
        torch.testing.assert_close(output[:, first:], wanted[:, first:], atol=2e-5, rtol=0)


@pytest.mark.parametrize("chunk", [1000, 50])
@pytest.mark.parametrize("name", METHODS)
def test_requests_side_by_side_are_as_each_alone(name, chunk):
    own, together, first = served(name, [40, 150, 201], chunk)
    check_each(name, own, together, first)
    assert all((output[:, :first] == 7.0).all() for output in together), "the engine's own rows"


@pytest.mark.parametrize("kind", [Implementation, Strided])
@pytest.mark.parametrize("name", METHODS)
def test_one_token_at_a_time(name, kind, monkeypatch):
    """Single rows are computed from the blocks, in several pieces, with waves that grow with the request."""
    monkeypatch.setattr(row_wise_module, "_PIECE", 2 * TOKENS * GROUPS * SIZE)
    monkeypatch.setattr(row_wise_module, "_MORE", 0)
    monkeypatch.setattr(Layout, "gather", None)
    own, outputs, first = served(name, [150, 100], 1, on=engine_of(name, kind))
    check_each(name, own, outputs, first)


@pytest.mark.parametrize("name", METHODS)
def test_stored_rotated_keys_are_the_last_written(name, monkeypatch):
    """Two requests, then two others in the same blocks; a block is rotated once until it is written again."""
    monkeypatch.setattr(row_wise_module, "_PIECE", 2 * TOKENS * GROUPS * SIZE)
    kept, keep = [], RotatedKeys.keep
    monkeypatch.setattr(RotatedKeys, "keep", lambda own, *given: (kept.append(given[1]), keep(own, *given)))
    on = engine_of(name, Strided, keeps_keys=True)
    for first_request in (0, 2):
        own, outputs, first = served(name, [150, 100], 1, on=on, first=first_request)
        check_each(name, own, outputs, first)
        if name == "self-extend-fixed":  # It has one table and reads complete blocks.
            numbers = [number for some in kept for number in some]
            assert len(numbers) == len(set(numbers)) > 10
        kept.clear()


@pytest.mark.parametrize("name", [name for name in METHODS if not name.startswith("window")])
def test_keys_are_rotated_again_after_a_change_of_frequencies(name):
    """The same blocks of the same request with another base, without a new write by the engine."""
    length, free = 150, [*range(BLOCKS)]
    random.Random(0).shuffle(free)
    table = torch.zeros(1, BLOCKS, dtype=torch.int32)
    count = -(-length // TOKENS)
    table[0, :count] = torch.tensor([free.pop() for _ in range(count)])
    engine, cache = on = engine_of(name, Strided, keeps_keys=True)
    (own,), _, _ = served(name, [length], 1, on=on)
    about = {"query_start_loc": torch.tensor([0, 1]), "seq_lens": torch.tensor([length]), "block_table": table}
    query = own[0][0, :, -1:].transpose(0, 1).contiguous()

    def last_row(engine, frequencies):
        engine.ctxext_rows.rotary.inv_freq = frequencies
        output = torch.empty_like(query)
        engine.forward(None, query, None, None, cache, SimpleNamespace(**about), output)
        return output

    plain, other = torch.tensor(BASE), torch.tensor(BASE) * torch.linspace(1, 0.5, PAIRS)
    before = last_row(engine, plain)
    fresh = [last_row(engine_of(name, Strided)[0], frequencies) for frequencies in (plain, other)]
    assert (fresh[0] - fresh[1]).abs().amax() > 1e-3
    for frequencies, wanted in ((plain, fresh[0]), (other, fresh[1]), (plain, fresh[0])):
        assert (last_row(engine, frequencies) - wanted).abs().amax() < 2e-5
    assert (before - fresh[0]).abs().amax() < 2e-5


@pytest.mark.parametrize("axis", [0, 1])
def test_blocks_with_strides_are_read_as_by_their_places(axis):
    """For any dimension of the block number."""
    engine, cache = Strided(), torch.randn(BLOCKS, GROUPS, TOKENS, 2 * SIZE)
    numbers, together = [5, 3, 60], [7, 8, 9]
    if axis:
        cache = cache.transpose(0, 1).contiguous()
        engine.do_kv_cache_update = lambda layer, key, value, cache, slots: Strided.do_kv_cache_update(
            engine, layer, key, value, cache.transpose(0, 1), slots
        )
    layout = Layout(engine, None, cache)
    assert None not in layout.strided
    by_strides = [layout.blocks(cache, part, some) for part in (0, 1) for some in (numbers, together)]
    layout.strided = [None, None]
    by_places = [layout.blocks(cache, part, some) for part in (0, 1) for some in (numbers, together)]
    assert all(map(torch.equal, by_strides, by_places))


@pytest.mark.parametrize(
    ("writes", "more", "lengths", "runs"),
    [
        (False, (None,), [100, 70], False),
        (False, (None,), [100, LENGTH], True),  # A row before the border.
        (True, (None,), [100, 70], True),
        (False, (torch.ones(1),), [100, 70], True),
    ],
)
def test_the_attention_of_the_engine_is_skipped_if_no_query_needs_it(writes, more, lengths, runs):
    rows, layer = rows_of("self-extend"), SimpleNamespace()
    layer.attn_backend = SimpleNamespace(forward_includes_kv_cache_update=writes)
    about = SimpleNamespace(query_start_loc=torch.tensor([0, 5, 6]), seq_lens=torch.tensor(lengths))
    assert rows.are_all(layer, about, more) is not runs
    assert not rows.are_all(SimpleNamespace(), about, ())  # The time of writing keys is unknown.


UNKNOWN = {
    "one number everywhere": lambda write, cache, key, value: cache.fill_(1.0),
    "nothing": lambda write, cache, key, value: None,
    "keys alone": lambda write, cache, key, value: write(key, torch.zeros_like(value)),
    "values alone": lambda write, cache, key, value: write(torch.zeros_like(key), value),
    "keys twice": lambda write, cache, key, value: write(key, key),
    "halves of numbers": lambda write, cache, key, value: write(key // 2 + 1, value // 2 + 1),
    "one number too few": lambda write, cache, key, value: (write(key, value), cache.view(-1)[7:9].zero_()),
}


@pytest.mark.parametrize("way", UNKNOWN)
def test_a_cache_that_is_not_understood_is_refused(way):
    engine, known = Implementation(), Implementation()

    def update(layer, key, value, cache, slots):
        UNKNOWN[way](lambda *pair: known.do_kv_cache_update(layer, *pair, cache, slots), cache, key, value)

    engine.do_kv_cache_update = update
    with pytest.raises(ValueError, match="does not support"):
        Layout(engine, None, torch.zeros(BLOCKS, GROUPS, TOKENS, 2 * SIZE))


@pytest.mark.parametrize(
    ("of_engine", "of_family"),
    [
        ({"logits_soft_cap": 2.0}, {"softcap": 2.0}),
        ({"logits_soft_cap": 0}, {}),
        ({"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])}, {"s_aux": torch.tensor([0.5, -1.0, 2.0, 0.0])}),
    ],
    ids=["softcap", "none", "sinks"],
)
def test_what_a_family_adds_to_its_attention_is_the_engines(of_engine, of_family):
    total = 100
    (query, key, value), scale = states(total, HEADS, GROUPS, SIZE), 0.3
    engine, rows = SimpleNamespace(scale=scale, **of_engine), rows_of("self-extend")
    output = rows.compute_rows(engine, query[:, :, rows.first :], key, value, rows.first)
    mask = torch.zeros(total, total).masked_fill(torch.ones(total, total).triu(1).bool(), -1e30)[None, None]
    call = Call(torch.arange(total)[None], backend="eager")
    wanted = made("self-extend").attend(stock_eager, call, query, key, value, mask, scaling=scale, **of_family)[0]
    assert (output - wanted[:, rows.first :]).abs().amax() < 2e-5


def test_rows_know_which_heads_of_the_model_they_are():
    """A method with weights per head uses those of this rank."""
    rows, seen = rows_of("self-extend"), []
    rows.first_head = 6
    attend = rows.methods[0].attend
    rows.methods[0].attend = lambda inner, call, *a, **k: seen.append(call) or attend(inner, call, *a, **k)
    query, key, value = states(70, HEADS, GROUPS, SIZE)
    rows.compute_rows(SimpleNamespace(scale=0.3), query[:, :, 64:], key, value, 64)
    assert [(call.first_head, call.kv_heads) for call in seen] == [(6, GROUPS)]


def test_the_border_is_the_first_different_query():
    assert rows_of("self-extend").first == LENGTH
    assert rows_of("sinks-short").first < LENGTH


def test_several_maps_act_from_the_first_border_on_the_innermost_first():
    rows, order = rows_of("self-extend"), []

    def method(name, first):
        def attend(inner, call, *states, **options):
            order.append((name, options["scaling"]))
            return inner(*states, **options)

        return SimpleNamespace(map=SimpleNamespace(first=first), maps={}, attend=attend)

    both = Rows(rows.part, rows.attention, rows.rotary, [method("inner", 70), method("outer", 66)], 0)
    assert both.first == 66
    query, key, value = states(80, HEADS, GROUPS, SIZE)
    both.compute_rows(SimpleNamespace(scale=0.3), query[:, :, 79:], key, value, 79)
    assert order == [("outer", 0.3), ("inner", 0.3)]


def test_maps_of_layers_act_from_their_borders():
    rows = rows_of("self-extend")
    layered = SimpleNamespace(map=None, maps={layer: SimpleNamespace(first=50 + layer) for layer in (0, 1)})
    for rows.part.layer in (0, 1):
        assert Rows(rows.part, rows.attention, rows.rotary, [layered], 0).first == 50 + rows.part.layer


def test_an_engine_that_warms_up_is_left_alone():
    engine, _ = engine_of("self-extend")
    engine.ctxext_rows.step.metadata = SimpleNamespace()  # Of an earlier step.
    output = torch.zeros(3, HEADS, SIZE)
    assert engine.forward(None, None, None, None, None, None, output) is output
    assert torch.equal(output, torch.full_like(output, 7.0))


def test_a_cache_with_other_strides_is_read_by_its_places():
    """An engine may pass a view with another layout than the measured one."""
    engine, cache = Strided(), torch.randn(BLOCKS, GROUPS, TOKENS, 2 * SIZE)
    layout, numbers = Layout(engine, None, cache), [5, 3, 60]
    other = cache.transpose(0, 1).contiguous().transpose(0, 1)
    assert other.stride() != cache.stride()
    for part in (0, 1):
        assert torch.equal(layout.blocks(other, part, numbers), layout.blocks(cache, part, numbers))


@pytest.mark.parametrize("numbers", [[5], [5, 3]])
def test_gathered_keys_have_contiguous_columns(numbers):
    """A request within one block, too: on CPUs, attention reads other strides as if they were contiguous."""
    engine, cache = Strided(), torch.randn(BLOCKS, GROUPS, TOKENS, 2 * SIZE)
    layout, length = Layout(engine, None, cache), len(numbers) * TOKENS - 3
    for part, gathered in enumerate(layout.gather(cache, numbers, length)):
        assert gathered.shape == (1, GROUPS, length, SIZE)
        assert gathered.stride(-1) == 1
        blocks = layout.blocks(cache, part, numbers)
        assert torch.equal(gathered[0, :, -1], blocks[-1, :, -4])


def test_rotated_keys_are_stored_if_all_layers_fit(monkeypatch):
    engine, cache = Strided(), torch.randn(BLOCKS, GROUPS, TOKENS, 2 * SIZE)
    layout, name = Layout(engine, None, cache), next(iter(METHODS))
    one = rows_of(name)
    other = Rows(one.part, one.attention, one.rotary, one.methods, 0, one.step)
    assert one.step is other.step
    assert one.step.layers == 2
    size = cache.numel() * cache.element_size() // 2  # Keys are half of a cache.
    monkeypatch.setattr("ctxext.engines.layout._MOST", 2 * size)
    assert [RotatedKeys.fits(layout, cache, layers) for layers in (1, 2, 3)] == [True, True, False]
