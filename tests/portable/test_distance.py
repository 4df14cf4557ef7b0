"""Distance-aware attention: its numbers are weights, and what they do hangs on the distance alone."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import tiny_models
from ctxext.api import Recipe, convert, verify
from ctxext.errors import CtxextError
from ctxext.methods import Yarn
from ctxext.recipes.registry import method_named
from portable_checkpoints import load
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


@pytest.fixture(scope="module")
def folder(source, tmp_path_factory):
    out = tmp_path_factory.mktemp("distance") / "out"
    convert(str(source), out, Recipe([DistanceAware()]), check=False)
    return put_numbers(out)


@pytest.mark.thorough
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
    assert "which is zero and must be trained" in card


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
def test_slopes_show_whether_training_had_an_effect(folder, row, changes):
    """At w = 0 nothing changes whatever v is, and at v = 0 any other w does."""
    model, ids = load(folder), torch.arange(5, 45)[None]
    numbers = [weight for name, weight in model.named_parameters() if name.endswith("distance.weight")]
    for weight in numbers:
        weight.zero_()
    stock = model(ids).logits
    for weight in numbers:
        weight[row] = 1.0
    assert torch.equal(model(ids).logits, stock) != changes


@pytest.mark.thorough
def test_weights_under_another_name_are_not_passed_over(source, tmp_path, monkeypatch):
    monkeypatch.setattr("ctxext.recipes.methods.distance_aware._WEIGHT", "distanec.weight")
    with pytest.raises(CtxextError, match="does not load in a clean process"):
        convert(str(source), tmp_path / "out", Recipe([DistanceAware()]))


@pytest.mark.thorough
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
