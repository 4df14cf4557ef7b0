"""Relation maps in a whole model: however a prompt arrives, the same logits; caches of every kind, and what they do."""

import copy
import functools
import shutil
import weakref

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

from ctxext.portable.method import state_of
from ctxext.recipes import METHODS as RECIPES
from portable_checkpoints import llama, load, write
from relation_cases import BASE, METHODS, Attached, made

TOTAL = 300
BACKENDS = ["sdpa", "other"]  # With tiles, and without what they need.


def model(name, backend="sdpa"):
    """A tiny Llama with the rotary of the cases and a method in its attention, or with none."""
    return built(name, backend)


@functools.cache
def built(name, backend):
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=97, max_position_embeddings=64, rope_theta=10000.0)
    made_model = LlamaForCausalLM(config).eval()
    for parameter in made_model.parameters():
        parameter.data *= 4 if parameter.ndim == 2 else 1  # So that attention is not flat.
    torch.testing.assert_close(made_model.model.rotary_emb.inv_freq, torch.tensor(BASE))
    if name is not None:
        Attached(made_model, made(name), f"relation_{name}_{backend}", backend)
    return made_model


def tokens(total=TOTAL, seed=0):
    return torch.randint(1, 97, (1, total), generator=torch.Generator().manual_seed(seed))


@functools.cache
def whole(name, seed=0):
    with torch.no_grad():
        return model(name)(tokens(seed=seed), use_cache=False).logits


def same(logits, expected):
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def ends(step, start, total):
    """Where the chunks of a prompt end; "one by one" is that at the original length, later and last."""
    if step != "one by one":
        return [*range(start + step, total, step), total]
    return [
        end for end in range(start + 1, total + 1) if 58 < end < 76 or end in (130, 180) or 190 < end < 198 or end > 293
    ]


def fed(name, ids, step, cache, start=0, backend="sdpa", **kwargs):
    """Logits of tokens fed in steps after what the cache holds."""
    parts, at = [], start
    for end in ends(step, start, ids.shape[1]):
        given = {key: value[:, :end] for key, value in kwargs.items()}
        parts.append(model(name, backend)(ids[:, at:end], past_key_values=cache, use_cache=True, **given).logits)
        at = end
    return torch.cat(parts, 1)


@pytest.mark.parametrize("name", METHODS)
@torch.no_grad()
def test_rows_inside_are_stock_and_others_are_not(name):
    stock, rules = whole(None), made(name).map
    own = whole(name)
    assert torch.equal(own[:, : rules.first], stock[:, : rules.first])
    assert (own[:, rules.first :] - stock[:, rules.first :]).abs().max() > 0.01


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(
    ("step", "backend"),
    [("one by one", "sdpa"), (7, "sdpa"), (64, "sdpa"), (500, "sdpa"), ("one by one", "other"), (64, "other")],
)
@torch.no_grad()
def test_any_chunks(name, step, backend):
    same(fed(name, tokens(), step, DynamicCache(), backend=backend), whole(name))


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("step", ["one by one", 7, 500])
@torch.no_grad()
def test_static_cache(name, step):
    network = model(name)
    cache = StaticCache(network.config, max_cache_len=320)
    mask = torch.ones(1, TOTAL, dtype=torch.long)
    same(fed(name, tokens(), step, cache, attention_mask=mask), whole(name))


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("step", ["one by one", 50, 400])
@torch.no_grad()
def test_batch_with_others(name, step):
    counts = [300, 283, 120, 37]
    ids = torch.zeros(4, TOTAL, dtype=torch.long)
    mask = torch.zeros(4, TOTAL, dtype=torch.long)
    for i, count in enumerate(counts):
        ids[i, TOTAL - count :], mask[i, TOTAL - count :] = tokens()[0, :count], 1
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    logits, at = [], 0
    cache = DynamicCache()
    for end in ends(step, 0, TOTAL):
        given = {"attention_mask": mask[:, :end], "position_ids": positions[:, at:end]}
        logits.append(model(name)(ids[:, at:end], past_key_values=cache, **given).logits)
        at = end
    logits = torch.cat(logits, 1)
    for i, count in enumerate(counts):
        same(logits[i : i + 1, TOTAL - count :], whole(name)[:, :count])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", METHODS)
@torch.no_grad()
def test_crop_and_go_on(name, backend):
    """Assisted decoding takes tokens back; other tokens come in their place."""
    cache = DynamicCache()
    fed(name, tokens()[:, :240], 80, cache, 0, backend)
    fed(name, tokens(), 1, cache, 240, backend)
    for keep in (280, 190, 100, 60):
        cache.crop(keep - cache.get_seq_length())
        ids = torch.cat([tokens()[:, :keep], tokens(seed=keep)[:, keep:]], 1)
        logits = fed(name, ids[:, : keep + 12], 1, cache, keep, backend)
        expected = model(name)(ids[:, : keep + 12], use_cache=False).logits[:, keep:]
        same(logits, expected)
        logits = fed(name, ids[:, : keep + 20], 9, cache, keep + 12, backend)
        same(logits, model(name)(ids[:, : keep + 20], use_cache=False).logits[:, keep + 12 :])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", METHODS)
@torch.no_grad()
def test_what_caches_do_to_sequences(name, backend):
    """Beams are reordered, repeated and selected; every sequence keeps its own turned keys."""
    network = model(name, backend)
    cache = DynamicCache()
    prompts = torch.cat([tokens(seed=seed)[:, :220] for seed in range(3)])
    network(prompts[:, :210], past_key_values=cache)
    fed(name, prompts, 1, cache, 210, backend)  # Turned keys are there now.

    def check(cache, prompts, seed):
        more = torch.cat([tokens(4, seed=seed + i) for i in range(len(prompts))])
        copied = copy.deepcopy(cache)
        logits = torch.cat([network(more[:, i : i + 1], past_key_values=copied).logits for i in range(4)], 1)
        same(logits, network(torch.cat([prompts, more], 1)).logits[:, -4:])
        return prompts

    check(cache, prompts, 10)
    cache.reorder_cache(torch.tensor([2, 0, 0]))
    prompts = check(cache, prompts[[2, 0, 0]], 20)
    cache.batch_repeat_interleave(2)
    prompts = check(cache, prompts.repeat_interleave(2, 0), 30)
    cache.batch_select_indices(torch.tensor([5, 1]))
    prompts = check(cache, prompts[[5, 1]], 40)


def test_a_cache_goes_with_its_last_user():
    """Not when garbage is next collected: the caches of several long prompts would be in memory at once."""
    cache = DynamicCache()
    state_of(cache)
    alive = weakref.ref(cache)
    del cache
    assert alive() is None


@pytest.mark.parametrize("name", ["self-extend", "dca", "rerope", "adaptive", "sinks"])
@torch.no_grad()
def test_beams_and_assistants(name):
    network = model(name)
    ids = tokens()[:, :180]
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    plain = network.generate(ids, **options)
    uncached = ids
    for _ in range(12):
        uncached = torch.cat([uncached, network(uncached, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(plain, uncached)
    assisted = network.generate(ids, prompt_lookup_num_tokens=4, **options)
    assert torch.equal(assisted[:, : plain.shape[1]], plain)  # 4.57 goes past the end.
    assert torch.equal(network.generate(ids, cache_implementation="static", disable_compile=True, **options), plain)
    beams = network.generate(ids, num_beams=3, **options)
    assert torch.equal(beams, network.generate(ids, num_beams=3, use_cache=False, **options))


@torch.no_grad()
def test_turned_keys_are_kept():
    """Decoding turns the near keys of a step, not all; without a cache to keep them with, all are turned."""
    network = model("self-extend")
    cache = DynamicCache()
    network(tokens(), past_key_values=cache)
    network(tokens(1), past_key_values=cache)
    name, state = ("turned keys", 0), state_of(cache)
    buffer = state.rows[name]
    assert state.common[name][2] == 302 - 1  # All keys, so that none turns again for a window's length of steps.
    network(tokens(1), past_key_values=cache)
    assert state.rows[name] is buffer
    cache.reorder_cache(torch.tensor([0]))  # Of beams, which move their turned keys too.
    assert state.common[name][2] == 302 - 1
    cache.crop(-2)
    assert name not in state.common


@torch.no_grad()
def test_a_row_whose_position_jumps_is_not_taken_for_the_next():
    """Decoding expects the next position; any other is read as without a step before it."""
    network, cache = model("self-extend"), DynamicCache()
    network(tokens(), past_key_values=cache)
    network(tokens(1), past_key_values=cache)
    for position in (303, 340):
        jump, fresh = {"position_ids": torch.tensor([[position]])}, copy.deepcopy(cache)
        state_of(fresh).common.clear()
        logits, expected = (network(tokens(1), past_key_values=one, **jump).logits for one in (cache, fresh))
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
        cache.crop(-1)
        network(tokens(1), past_key_values=cache)


@pytest.mark.parametrize("name", METHODS)
def test_fine_tuning_gradients_do_not_depend_on_checkpointing(name):
    network = model(name)
    grads = []
    for on in (False, True):
        network.train()
        if on:
            network.gradient_checkpointing_enable({"use_reentrant": False})
        network.zero_grad()
        ids = tokens(200)
        network(ids, labels=ids, use_cache=False).loss.backward()
        grads.append([parameter.grad.clone() for parameter in network.parameters()])
        network.gradient_checkpointing_disable()
        network.eval()
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


@torch.no_grad()
def test_layers_of_a_loaded_model_share_one_plan(tmp_path, monkeypatch):
    """Positions and masks are read once for all layers, not once in each."""
    llama(tmp_path / "source")
    shutil.copytree(tmp_path / "source", tmp_path / "one_plan")
    recipe = next(recipe for recipe in RECIPES if recipe.name == "self-extend")
    network = load(write(tmp_path / "one_plan", recipe(factor=2)))
    method, plans = type(network.model.layers[0].ctxext_part.methods[0]), []
    original = method.cheapest_plan
    monkeypatch.setattr(method, "cheapest_plan", lambda *args: plans.append(original(*args)) or plans[-1])
    ids = torch.randint(1, 64, (1, 300), generator=torch.Generator().manual_seed(0))
    cache = network(ids[:, :299]).past_key_values
    network(ids[:, 299:], past_key_values=cache)
    assert [plan.form for plan in plans] == ["tiles", "step"]
