"""Order and cache: the order belongs to the sequence, whatever happens to its cache."""

import copy

import pytest
import torch
from transformers import DynamicCache, StaticCache

import tiny_models
from portable_checkpoints import code_of, convert, llama, load, ranks_of, tokens, with_ranks

LENGTHS = [9, 40, 17]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return llama(tmp_path_factory.mktemp("generation") / "source", num_attention_heads=8, num_key_value_heads=4)


@pytest.fixture(scope="module")
def folder(source, tmp_path_factory):
    return convert(source, tmp_path_factory.mktemp("generation") / "prompt", first_layer=0)


@pytest.fixture
def model(folder):
    return load(folder)


def greedy(model, ids, mask=None, **options):
    mask = torch.ones_like(ids) if mask is None else mask
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "output_logits": True} | options
    output = model.generate(ids, attention_mask=mask, return_dict_in_generate=True, **options)
    return output.sequences[:, ids.shape[1] :], output


def padded(prompts, side="left"):
    width = max(len(prompt) for prompt in prompts)
    ids, mask = torch.zeros(len(prompts), width, dtype=torch.long), torch.zeros(len(prompts), width, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        place = slice(width - len(prompt), width) if side == "left" else slice(0, len(prompt))
        ids[row, place], mask[row, place] = prompt, 1
    return ids, mask


def static_cache(model, rows, length):
    try:
        return StaticCache(config=model.config, max_cache_len=length)
    except TypeError:
        return StaticCache(model.config, rows, length)


@torch.no_grad()
def test_orders_differ_between_prompts(model):
    orders = {tuple(ranks_of(model(tokens(40, seed=seed)).past_key_values)[1][0].tolist()) for seed in range(8)}
    assert len(orders) > 1


@torch.no_grad()
@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("pieces", [(30,), (12, 10, 8), (1, 29)])
def test_cached_is_uncached_with_the_same_order(model, source, tmp_path, kind, pieces):
    ids = tokens(300)  # Past the trained length of 256.
    cache = DynamicCache() if kind == "dynamic" else static_cache(model, 1, 320)
    logits, start = [], 0
    for size in (*pieces, *[1] * 6, 250, *[1] * 14):
        positions = torch.arange(start, start + size)
        logits.append(
            model(
                ids[:, start : start + size], past_key_values=cache,
                position_ids=positions[None], cache_position=positions,
            ).logits
        )  # fmt: skip
        start += size
    uncached = load(with_ranks(source, tmp_path / "static", cache, first_layer=0))
    torch.testing.assert_close(torch.cat(logits, 1), uncached(ids).logits, rtol=1e-4, atol=1e-4)
    # The first piece fixed the order.
    first = model(ids[:, : pieces[0]], past_key_values=DynamicCache())
    assert all(torch.equal(ranks, ranks_of(cache)[layer]) for layer, ranks in ranks_of(first.past_key_values).items())


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.thorough
def test_second_generation_equals_a_fresh_model(folder, cache):
    model, options = load(folder), {"cache_implementation": cache} if cache else {}
    greedy(model, tokens(40, seed=1), **options)
    again, _ = greedy(model, tokens(40, seed=2), **options)
    fresh, _ = greedy(load(folder), tokens(40, seed=2), **options)
    assert torch.equal(again, fresh)
    assert torch.equal(again, greedy(model, tokens(40, seed=2))[0])


@torch.no_grad()
def test_a_cache_that_was_reset_chooses_anew(model):
    cache = static_cache(model, 1, 64)
    for seed in (1, 2):
        cache.reset() if seed == 2 else None
        positions = torch.arange(40)
        model(tokens(40, seed=seed), past_key_values=cache, position_ids=positions[None], cache_position=positions)
    expected = model(tokens(40, seed=2), past_key_values=DynamicCache()).past_key_values
    assert all(torch.equal(ranks, ranks_of(cache)[layer]) for layer, ranks in ranks_of(expected).items())


@torch.no_grad()
def test_ranks_follow_their_rows(model):
    prompts = torch.cat([tokens(40, seed=seed) for seed in range(3)])
    cache = model(prompts, past_key_values=DynamicCache()).past_key_values
    before = ranks_of(cache)
    cache.reorder_cache(torch.tensor([2, 0, 1]))
    assert torch.equal(ranks_of(cache)[1], before[1][[2, 0, 1]])
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([0, 2, 4]))
    assert torch.equal(ranks_of(cache)[1], before[1][[2, 0, 1]])
    step = model(tokens(3, seed=9).T, past_key_values=copy.deepcopy(cache)).logits
    for row, prompt in enumerate([2, 0, 1]):
        alone = model(prompts[prompt][None], past_key_values=DynamicCache()).past_key_values
        expected = model(tokens(3, seed=9).T[row][None], past_key_values=alone).logits
        torch.testing.assert_close(step[row], expected[0], rtol=1e-4, atol=1e-4)


def test_awareness_ignores_what_padding_holds(model):
    awareness = code_of(model).awareness
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 3, 2, 12, 8, generator=generator), torch.randn(2, 3, 12, 8, generator=generator)
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, :5] = 0
    before = awareness(query, key, mask)
    torch.testing.assert_close(before[1], awareness(query[1:], key[1:])[0])
    key[0, :, :5] = 100.0
    torch.testing.assert_close(before, awareness(query, key, mask))
    torch.testing.assert_close(before[0], awareness(query[:1, :, :, 5:], key[:1, :, 5:])[0])


@torch.no_grad()
@pytest.mark.parametrize("implementation", ["eager", "sdpa", pytest.param("flex_attention", marks=pytest.mark.slow)])
def test_packed_sequences_are_refused_and_padding_is_not(folder, implementation):
    """Trainers pack by positions alone. Padding may stand at any position: pipelines put it at 0 or at 1."""
    model = load(folder, attn_implementation=implementation)
    prompts = [tokens(length, seed=length) for length in LENGTHS]
    ids, places = torch.cat(prompts, 1), [torch.arange(length) for length in LENGTHS]
    one_each = [torch.zeros(1, dtype=torch.long), *places]
    packed = {"restart": (ids, places), "one token": (torch.cat([ids[:, :1], ids], 1), one_each)}
    packed["gap"] = ids, [torch.arange(40), torch.arange(26) + 50]
    if implementation == "flex_attention":
        packed, prompts = {"restart": packed["restart"]}, []
    for text, positions in packed.values():
        with pytest.raises(ValueError, match=r"Ms-PoE in prompt order .* Packed sequences, .* --head-order"):
            model(text, position_ids=torch.cat(positions)[None], use_cache=False)
    with pytest.raises(ValueError, match="Packed sequences"):
        model(ids, position_ids=torch.cat(places)[None], past_key_values=DynamicCache())
    for side in ("left", "right") if prompts else ():
        ids, mask = padded([prompt[0] for prompt in prompts], side)
        expected = model(ids, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0)).logits
        other = model(ids, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)).logits
        torch.testing.assert_close(other[mask == 1], expected[mask == 1], rtol=1e-4, atol=1e-4)


def test_packed_sequences_are_known_by_any_mask(model):
    """Of flash attention, which needs another machine, the mask is the tokenizer's or none."""
    is_packed = code_of(model).is_packed
    text, packed = torch.arange(9)[None], torch.cat([torch.arange(4), torch.arange(5)])[None]
    left, ones = torch.ones(1, 9).masked_fill(torch.arange(9) < 4, 0), torch.ones(1, 9, dtype=torch.long)
    assert [is_packed(text, None), is_packed(text, ones), is_packed(text, left)] == [False] * 3
    assert [is_packed(packed, None), is_packed(packed, ones), is_packed(packed, left)] == [True, True, False]


@torch.no_grad()
def test_the_statistic_has_the_scale_of_the_attention(tmp_path):
    model = load(convert(tiny_models.save("granite", tmp_path / "source"), tmp_path / "prompt", first_layer=0))
    code, seen = code_of(model), []
    awareness = code.awareness
    code.awareness = lambda query, key, mask, scaling: seen.append(scaling) or awareness(query, key, mask, scaling)
    model(tokens(20))
    assert seen == [model.config.attention_multiplier] * 2
    assert seen[0] != model.model.layers[0].self_attn.head_dim ** -0.5


def test_heads_with_equal_counts_are_equal_to_the_last_bit(model):
    """How the counts are spread over the queries that share a key head must not decide between two of them."""
    awareness = code_of(model).awareness
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(9, 16, 3, 41, 16, generator=generator), torch.randn(9, 16, 41, 16, generator=generator)
    for mask in (None, torch.arange(41)[None] >= torch.arange(9)[:, None]):
        shares = awareness(query, key, mask)
        lengths = torch.full((9, 1), 41) if mask is None else mask.sum(-1, keepdim=True)
        counts = (shares * 3 * lengths).round()
        assert all(len(row.unique()) == len(own.unique()) < 16 for row, own in zip(shares, counts, strict=True))


def test_awareness_scales_and_computes_in_float32(model):
    awareness = code_of(model).awareness
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(1, 8, 2, 300, 16, generator=generator), torch.randn(1, 8, 300, 16, generator=generator)
    scaled = awareness(query, key, scaling=0.5)
    assert torch.equal(scaled, awareness(query * 2.0, key, scaling=0.25))
    assert not torch.equal(scaled, awareness(query, key))
    half, half_key = query.bfloat16(), key.bfloat16()
    assert torch.equal(awareness(half, half_key), awareness(half.float(), half_key.float()))
