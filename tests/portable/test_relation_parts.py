"""The parts of relation maps, each against loops over sequences, rows and keys: no sequence stands for another."""

import math
from types import SimpleNamespace

import pytest
import torch
from transformers import DynamicCache

from ctxext.portable.modeling_alibi import positions_of
from ctxext.portable.relation_parts import (
    NOWHERE,
    Places,
    Side,
    apply_softmax,
    causal,
    join_outputs,
    keep_side,
    places_of,
    plain_base,
    side_of,
    visible,
)
from relation_cases import Call, FlexMask, made


def generator(seed):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("window", [0, 1, 3, 20])
@pytest.mark.parametrize("base", [0, 4])
def test_which_keys_a_row_sees(base, window):
    """Without a mask, with the tokenizer's, with one of scores or of flex attention, for chosen rows of a batch."""
    total, length = base + 6, 6
    shown = torch.tensor([[1] * total, [0, 0, *[1] * (total - 2)], [1] * (total - 1) + [0]])
    rows = torch.tensor([[0, 2, 5], [5, 1, 1], [3, 3, 4]])

    def seen(batch, row, key, by=shown):
        own = base + row
        return key <= own and (not window or key > own - window) and bool(by[batch, key])

    for given, by in ((None, torch.ones_like(shown)), (shown, shown)):
        expected = [[[seen(b, int(m), n, by) for n in range(total)] for m in picked] for b, picked in enumerate(rows)]
        mask = causal(rows, total, base, given, window)
        assert torch.equal(mask.expand(3, -1, -1), torch.tensor(expected))
        assert torch.equal(visible(given, rows, total, base, window).expand(3, -1, -1), torch.tensor(expected))
    full = torch.tensor([[[[seen(b, m, n) for n in range(total)] for m in range(length)]] for b in range(3)])
    picked = torch.stack([full[b, 0, rows[b]] for b in range(3)])
    roomy = torch.nn.functional.pad(full, (0, 2), value=True)
    additive = torch.zeros(full.shape).masked_fill_(~full, torch.finfo(torch.float32).min)
    for given in (full, roomy, additive, FlexMask(full)):
        assert torch.equal(visible(given, rows, total, base), picked)


@pytest.mark.parametrize("room", [0, 5])
@pytest.mark.parametrize("alike", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_the_cache_stores_the_positions_of_its_keys(seed, alike, room):
    """Chunk by chunk: each sequence has positions of its own, even where those of the last rows are alike."""
    draw, cache, seen = generator(seed), DynamicCache(), 0
    lengths = [4, 1, 3, 1]
    total = sum(lengths) + room
    kept = [[], [], []]
    for number, length in enumerate(lengths):
        positions = torch.randint(100, (3, length), generator=draw)
        rotated = positions + torch.randint(9, (3, 1), generator=draw)
        if alike and number:
            positions, rotated = positions[:1].expand(3, -1), rotated[:1].expand(3, -1)
        call = Call(positions, cache=cache, seen=seen)
        call.rotated = rotated
        seen += length
        keys = torch.zeros(3, 1, total if room else seen, 4)
        places = places_of(call, keys, length, None, seen - length)
        for row, own in enumerate(kept):
            own += list(zip(positions[row].tolist(), rotated[row].tolist(), strict=True))
        whole = torch.tensor(kept)
        assert torch.equal(places.rows.expand(3, -1), positions)
        assert torch.equal(places.rotated.expand(3, -1), rotated)
        assert torch.equal(places.keys.expand(3, -1)[:, :seen], whole[..., 0])
        assert torch.equal(places.rotated_keys.expand(3, -1)[:, :seen], whole[..., 1])
        assert (places.keys[:, seen:] == NOWHERE).all()
        assert places_of(call, keys, length, None, seen - length) is places


def test_passed_positions_continue_those_of_cached_tokens():
    """Padded by 2 and by 5 at first, with no positions given; then the user gives the columns."""
    cache, columns = DynamicCache(), torch.arange(8)[None].expand(2, -1)
    first = Call((columns - torch.tensor([[2], [5]])).clamp(min=0), cache=cache, seen=0)
    first.rotated = columns
    places_of(first, torch.zeros(2, 1, 8, 4), 8, None, 0)
    given = torch.tensor([[8, 9]]).expand(2, -1)
    places = places_of(Call(given, cache=cache, seen=8), torch.zeros(2, 1, 10, 4), 2, None, 8)
    assert places.rows.tolist() == [[6, 7], [3, 4]]
    assert places.rotated.tolist() == [[8, 9], [8, 9]]
    assert places.keys[:, -3:].tolist() == [[5, 6, 7], [2, 3, 4]]


@pytest.mark.parametrize("base", [0, 3])
@pytest.mark.parametrize("changed", ["rows", "rotated", "keys", "rotated_keys", "start", "nothing"])
@pytest.mark.parametrize("row", [0, 1])
def test_only_what_is_plain_in_every_sequence_is_plain(base, changed, row):
    length, total = 5, base + 5
    m = torch.arange(base, total).repeat(2, 1)
    n = torch.arange(total).repeat(2, 1)
    parts = {"rows": m.clone(), "rotated": m.clone(), "keys": n.clone(), "rotated_keys": n.clone()}
    if changed == "start":
        parts["rows"][row] += 1
        parts["rotated"][row] += 1
    elif changed != "nothing":
        parts[changed][row, 2] += 1
    places, is_plain = Places(**parts), changed == "nothing"
    full = torch.ones(length, total, dtype=torch.bool).tril(base).repeat(2, 1, 1, 1)
    ones = torch.ones(2, total, dtype=torch.long)
    for mask in (None, ones, full, torch.nn.functional.pad(full, (0, 4), value=True)):
        assert plain_base(places, mask, total, base) == (base if is_plain else None)
    ones[row, 0], full[row, 0, 3, 0] = 0, False
    later = torch.ones(length, total, dtype=torch.bool).tril(base).repeat(2, 1, 1, 1)
    later[row, 0, 1, -1] = True
    for mask in (ones, full, later, torch.zeros(2, 1, length, total)):
        assert plain_base(places, mask, total, base) is None


OPTIONS = [
    {},
    {"softcap": 2.0},
    {"s_aux": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    {"softcap": 3.0, "s_aux": torch.tensor([4.0, 0.0, 1.0, -2.0])},
]


@pytest.mark.parametrize("hides", [False, True])
@pytest.mark.parametrize("kind", ["none", "tokens", "bool", "scores", "flex", "window"])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: " ".join(options) or "plain")
def test_one_softmax_over_what_a_row_sees(options, kind, hides):
    """Rows 2 to 5 of 7 behind 3 keys, two sequences, two heads to a key head: against float64 loops."""
    draw, base, total, span, options = generator(1), 3, 8, (2, 5), dict(options)
    scores = 2 * torch.randn(2, 4, 3, total, generator=draw)
    value = torch.randn(2, 2, total, 6, generator=draw)
    shown = torch.ones(2, 10, dtype=torch.long)
    shown[0, 1], shown[1, :2] = 0, 0
    hidden = torch.rand(2, 3, total, generator=draw) < 0.3 if hides else None
    lenient = torch.rand(2, 1, 7, 10, generator=draw) < 0.7
    lenient[..., 0] = True
    added = torch.randn(2, 1, 7, 10, generator=draw)
    masks = {
        "none": None,
        "tokens": shown,
        "bool": lenient,
        "scores": added,
        "flex": FlexMask(lenient),
        "window": shown,
    }
    if hides:  # But for one key that each row sees.
        hidden[:, range(3), range(5, 8)] = False
        hidden[..., 0] = kind not in ("bool", "flex")
    if kind == "window":
        options["sliding_window"] = 3
    output, weights = apply_softmax(scores, value, masks[kind], span, base, hidden, options)
    assert output.shape == (2, 3, 4, 6)
    for b in range(2):
        for h in range(4):
            for row, m in enumerate(range(*span)):
                own = {}
                for n in range(total):
                    score = float(scores[b, h, row, n])
                    if cap := options.get("softcap"):
                        score = cap * math.tanh(score / cap)
                    sees = n <= base + m and (kind != "window" or n > base + m - 3)
                    sees = sees and (kind not in ("tokens", "window") or bool(shown[b, n]))
                    if kind in ("bool", "flex"):
                        sees = bool(lenient[b, 0, m, n])
                    elif kind == "scores":
                        sees, score = True, score + float(added[b, 0, m, n])
                    if sees and not (hides and hidden[b, row, n]):
                        own[n] = math.exp(score)
                rest = math.exp(float(options["s_aux"][h])) if "s_aux" in options else 0.0
                share = {n: part / (rest + sum(own.values())) for n, part in own.items()}
                expected = torch.tensor([share.get(n, 0.0) for n in range(total)])
                torch.testing.assert_close(weights[b, h, row], expected, rtol=1e-4, atol=1e-5)
                answer = sum(part * value[b, h // 2, n] for n, part in share.items())
                torch.testing.assert_close(output[b, row, h], answer, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("levels", "origins"), [([2, 2], [0, 1]), (2, 0)])
def test_rotated_keys_are_stored_for_their_layer_levels_and_texts(levels, origins):
    cache, key = DynamicCache(), torch.arange(2 * 2 * 3 * 4.0).view(2, 2, 3, 4)
    cache.update(key, key, 0)
    call = Call(torch.arange(3)[None], cache=cache)
    side = side_of(call, key, levels, origins)
    assert side.filled == 0
    assert side.buffer.shape[2] >= 3
    side.buffer[:, :, :3] = key
    keep_side(call, side._replace(filled=3))
    longer = torch.zeros(2, 2, side.buffer.shape[2] + 1, 4)
    for again in (key, longer):  # Where there is no more room, what is final moves along.
        kept = side_of(call, again, levels, origins)
        assert (kept.filled, kept.levels, kept.origins) == (3, levels, origins)
        assert kept.buffer.shape[2] >= again.shape[2]
        assert torch.equal(kept.buffer[:, :, :3], key)
    for others in ((3, origins), (levels, 1)):
        assert side_of(call, key, *others)[:2] == others
        assert side_of(call, key, *others).filled == 0
    assert side_of(Call(torch.arange(3)[None], layer=1, cache=cache), key, levels, origins).filled == 0
    cache.reorder_cache(torch.tensor([1, 0]))  # Only those that are alike move.
    moved = side_of(call, key, levels, origins)
    assert moved.filled == (0 if isinstance(levels, list) else 3)
    assert torch.equal(moved.buffer[:, :, : moved.filled], key.flip(0)[:, :, : moved.filled])
    keep_side(call, Side([1, 2], [0, 0], side.buffer, 3))
    assert side_of(call, key, levels, origins).filled == 0
    keep_side(call, Side(levels, origins, side.buffer, 3))
    cache.crop(-1)
    assert side_of(call, key, levels, origins).filled == 0


@pytest.mark.parametrize("seen", [0, 4])
def test_positions_of_queries_with_different_slopes(seen):
    """By a mask of tokens and by one of pairs alike: padding on the left counts for nothing."""
    padding, length = [0, 2, 3], 5
    total = seen + length
    tokens = (torch.arange(total) >= torch.tensor(padding)[:, None]).long()
    hidden = [[[[n < pad or n > seen + m for n in range(total)] for m in range(length)]] for pad in padding]
    pairs, rows = torch.tensor(hidden), torch.arange(length) + seen
    additive = torch.zeros(pairs.shape).masked_fill_(pairs, torch.finfo(torch.float32).min)
    expected = rows - torch.tensor(padding)[:, None]
    real = expected >= 0
    assert torch.equal(positions_of(None, seen, length, "cpu"), rows[None])
    for mask in (tokens, pairs, additive):
        positions = positions_of(mask, seen, length, "cpu")
        assert torch.equal(positions[real], expected[real])


def test_queries_of_both_forms_are_joined_by_sequence():
    """Where the rows of one sequence change and those of another do not, each has its own answer."""
    changed = torch.tensor([[False, False, True, True], [False, True, True, True]])
    stock, own = torch.zeros(2, 3, 1, 2), torch.ones(2, 3, 1, 2)
    plan = type("Plan", (), {"first": 1, "served": 3})
    output, _ = join_outputs(changed, plan, (stock, None), (own, None))
    assert torch.equal(output[..., 0, 0], changed.float())


@pytest.mark.parametrize("seen", [1, 4, 6])
def test_a_cropped_cache_drops_the_positions_of_removed_keys(seen):
    cache, positions = DynamicCache(), torch.tensor([[0, 1, 2, 3, 4, 5], [7, 8, 9, 10, 11, 12]])
    places_of(Call(positions, cache=cache, seen=0), torch.zeros(2, 1, 6, 4), 6, None, 0)
    more = torch.tensor([[50, 51], [60, 61]])
    places = places_of(Call(more, cache=cache, seen=seen), torch.zeros(2, 1, seen + 2, 4), 2, None, seen)
    assert torch.equal(places.keys, torch.cat([positions[:, :seen], more], 1))


def test_what_is_computed_ahead_is_computed_again_for_other_frequencies():
    """Schedules that depend on the length change them between two steps, in the tensor that was seen before."""
    method, inverse = made("self-extend"), torch.tensor([1.0, 0.5])
    call = SimpleNamespace(tables=SimpleNamespace(frame=SimpleNamespace(inverse=inverse)))
    results = iter("abc")
    assert [method.kept_for(call, "name", 16, lambda: next(results)) for _ in range(2)] == ["a", "a"]
    inverse[1] = 0.25
    assert [method.kept_for(call, "name", 16, lambda: next(results)) for _ in range(2)] == ["b", "b"]
    assert method.kept_for(call, "name", 32, lambda: next(results)) == "c"


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_keys_stay_far_for_later_rows_up_to_the_first_that_is_near(order):
    """Padding between two turns has any position: what stands behind a near key is not counted, in any sequence."""
    method = made("self-extend")
    first = torch.cat([torch.arange(95), torch.tensor([1, 1, 1]), torch.arange(95, 101)])
    second = torch.cat([torch.tensor([1, 1]), torch.arange(80), torch.tensor([1] * 15), torch.arange(80, 87)])
    m, keys = torch.tensor([[100], [86]])[order], torch.stack([first, second])[order]
    rows = method.map.rows(m, m)
    low = [next(n for n, key in enumerate(own) if key >= far) for own, far in zip(keys, rows.far, strict=True)]
    single = method.plan_single_query(method.map, Places(m, m, keys, keys), rows, (None, None), None, 2, False)
    assert single.low == min(low)
    assert single.levels == rows.level[:, 0].tolist()
    assert single.origins == keys[:, 0].tolist()


@pytest.mark.parametrize("trains", [False, True])
def test_no_rotated_keys_are_stored_in_training(trains):
    """A later step would write into what the way back needs."""
    method, m, keys = made("self-extend"), torch.tensor([[100]]), torch.arange(101)[None]
    places, rows = Places(m, m, keys, keys), method.map.rows(m, m)
    single = method.plan_single_query(method.map, places, rows, (None, None), None, 1, trains)
    assert (single.levels is None) == trains
