"""Distance-aware attention: its numbers are weights, and what they do hangs on the distance alone."""

import json
import math

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DynamicCache

import tiny_models
from ctxext.converters import convert
from ctxext.errors import CtxextError
from ctxext.recipes import Recipe, Yarn, method_named
from ctxext.verify import verify
from tiny_base import QUICK, documents, make_base, tune

DistanceAware = method_named("distance-aware")
NAME = "model.layers.{}.self_attn.distance.weight"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return tiny_models.save("llama", tmp_path_factory.mktemp("distance") / "source")


def put_numbers(folder):
    """Random numbers into the checkpoint's file, as a fine-tune would leave them."""
    path = folder / "model.safetensors"
    weights, rng = load_file(path), torch.Generator().manual_seed(0)
    for name in weights:
        if name.endswith("distance.weight"):
            weights[name] = torch.randn(weights[name].shape, generator=rng)
    save_file(weights, path, metadata={"format": "pt"})
    return folder


def load(folder, **options):
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32, **options).eval()


@pytest.fixture(scope="module")
def folder(source, tmp_path_factory):
    out = tmp_path_factory.mktemp("distance") / "out"
    convert(str(source), out, Recipe([DistanceAware()]), check=False)
    return put_numbers(out)


def test_the_numbers_are_zeros_among_the_weights_and_all_else_is_the_sources(source, tmp_path):
    convert(str(source), tmp_path / "out", Recipe([Yarn(factor=4), DistanceAware()]), check=False)
    old, new = (load_file(place / "model.safetensors") for place in (source, tmp_path / "out"))
    added = sorted(new.keys() - old.keys())
    assert added == [NAME.format(layer) for layer in range(len(added))]
    assert all(not new[name].any() and new[name].shape == (2, 4) for name in added)
    assert all(torch.equal(old[name], new[name]) for name in old)
    findings = {finding.check: finding for finding in verify(str(tmp_path / "out"), against=str(source))}
    assert findings["against"].status == findings["logits"].status == "passed"
    assert "distance.weight" in findings["against"].detail
    stock = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    assert stock.config.num_attention_heads == 4
    card = (tmp_path / "out" / "README.md").read_text()
    assert "distance.weight" in card
    assert "zeros, yet to be trained" in card


def test_sharded_weights_get_them_in_the_smallest_file(source, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    model.save_pretrained(tmp_path / "sharded", max_shard_size="40KB")
    convert(str(tmp_path / "sharded"), tmp_path / "out", Recipe([DistanceAware()]), check=False)
    before, after = (
        json.loads((tmp_path / name / "model.safetensors.index.json").read_text()) for name in ("sharded", "out")
    )
    added = after["weight_map"].keys() - before["weight_map"].keys()
    assert added == {NAME.format(layer) for layer in range(model.config.num_hidden_layers)}
    assert after["metadata"]["total_size"] == before["metadata"]["total_size"] + len(added) * 2 * 4 * 4
    for name in added:
        with safe_open(tmp_path / "out" / after["weight_map"][name], "pt") as file:
            assert name in file.keys()  # noqa: SIM118
    with torch.no_grad():
        ids = torch.arange(5, 45)[None]
        assert torch.equal(load(tmp_path / "out")(ids).logits, model.eval()(ids).logits)


@torch.no_grad()
@pytest.mark.parametrize(("row", "changes"), [(0, True), (1, False)])
def test_slopes_alone_say_whether_anything_was_learned(folder, row, changes):
    """At w = 0 nothing changes whatever v is, and at v = 0 any other w does."""
    model, ids = load(folder), torch.arange(5, 45)[None]
    numbers = [weight for name, weight in model.named_parameters() if name.endswith("distance.weight")]
    for weight in numbers:
        weight.zero_()
    stock = model(ids).logits
    for weight in numbers:
        weight[row] = 1.0
    assert torch.equal(model(ids).logits, stock) != changes


@torch.no_grad()
def test_chunks_caches_and_padding_agree(folder):
    model = load(folder)
    ids = torch.arange(60)[None] * 7 % 90 + 5
    whole = model(ids, use_cache=False).logits
    stock = load(folder)
    for name, weight in stock.named_parameters():
        if name.endswith("distance.weight"):
            weight.zero_()
    assert (stock(ids).logits - whole).abs().max() > 1e-2, "the numbers change something"
    for sizes in ((60,), (20, 40), (30, *[1] * 30)):
        cache, start, parts = DynamicCache(config=model.config), 0, []
        for size in sizes:
            parts.append(model(ids[:, start : start + size], past_key_values=cache, use_cache=True).logits)
            start += size
        assert (torch.cat(parts, 1) - whole).abs().max() < 1e-4
    padded = torch.cat([torch.zeros(1, 7, dtype=torch.long), ids], 1)
    mask = torch.cat([torch.zeros(1, 7, dtype=torch.long), torch.ones_like(ids)], 1)
    both = torch.cat([padded, torch.arange(67)[None] % 90 + 5])
    batched = model(both, attention_mask=torch.cat([mask, torch.ones_like(mask)]), use_cache=False).logits
    assert (batched[:1, 7:] - whole).abs().max() < 1e-4
    eager = load(folder, attn_implementation="eager")(ids, output_attentions=True)
    assert (eager.logits - whole).abs().max() < 1e-4
    assert torch.allclose(eager.attentions[0].sum(-1), torch.ones(()))


@torch.no_grad()
def test_one_layer_against_the_formula(folder):
    """The weights of the first layer's attention from its own queries and keys."""
    model = load(folder, attn_implementation="eager")
    attention = model.model.layers[0].self_attn
    ids = torch.arange(40)[None] * 7 % 90 + 5
    kept = {}
    module = __import__(type(attention).__module__, fromlist=["x"])
    apply = module.apply_rotary_pos_emb

    def told(*args, **kwargs):
        rotated = apply(*args, **kwargs)
        kept.setdefault("rotated", rotated)
        return rotated

    module.apply_rotary_pos_emb = told
    try:
        weights = model(ids, output_attentions=True).attentions[0]
    finally:
        module.apply_rotary_pos_emb = apply
    query, key = kept["rotated"]
    (w, v), length = attention.distance.weight.tolist(), model.config.max_position_embeddings
    for head, m in ((0, 5), (1, 17), (3, 39)):
        own = key[0, head * key.shape[1] // query.shape[1]]
        scores = [float(query[0, head, m] @ own[n]) / math.sqrt(query.shape[-1]) for n in range(m + 1)]
        factors = [(1 + math.exp(v[head])) / (1 + math.exp(v[head] - w[head] * (m - n) / length)) for n in range(m + 1)]
        changed = [s * f if s > 0 else s for s, f in zip(scores, factors, strict=True)]
        total = sum(map(math.exp, changed))
        expected = torch.tensor([math.exp(s) / total for s in changed])
        assert (weights[0, head, m, : m + 1] - expected).abs().max() < 1e-5


def test_weights_under_another_name_are_not_passed_over(source, tmp_path, monkeypatch):
    monkeypatch.setattr("ctxext.recipes.methods.distance_aware._WEIGHT", "distanec.weight")
    with pytest.raises(CtxextError, match="does not load in a clean process"):
        convert(str(source), tmp_path / "out", Recipe([DistanceAware()]))


def test_a_fine_tune_trains_them_and_the_merge_keeps_them(tmp_path):
    base = make_base(tmp_path, Yarn(factor=4), DistanceAware())
    import dataclasses

    options = dataclasses.replace(QUICK, steps=8, learning_rate=2e-2)
    tune(base, tmp_path / "out", options)
    weights = load_file(tmp_path / "out" / "model.safetensors")
    numbers = [weights[name] for name in weights if name.endswith("distance.weight")]
    assert len(numbers) == 2
    assert all(one[0].abs().min() > 0 for one in numbers), "every w was trained"
    findings = verify(str(tmp_path / "out"), against=str(base))
    assert [finding for finding in findings if finding.status == "failed"] == []
    from peft import PeftModel

    merged, ids = load(tmp_path / "out"), torch.tensor([documents(1)[0][:60]])
    adapted = PeftModel.from_pretrained(load(base), tmp_path / "out" / "adapter").eval()
    with torch.no_grad():
        assert (merged(ids).logits - adapted(ids).logits).abs().max() < 1e-4
