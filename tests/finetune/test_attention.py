"""Packed documents: attention equals that with explicit masks, and no tensor grows quadratically."""

import copy
from importlib import import_module

import pytest
import torch
from transformers import AutoModelForCausalLM, BloomConfig, Lfm2Config, LlamaConfig, MistralConfig, MixtralConfig

from ctxext.errors import CtxextError
from ctxext.finetune.attention import DOCUMENTS, attend_by_document, can_separate_documents
from tiny_base import SIZES, Largest, change, tune

LENGTHS = ([40, 3, 1, 84], [1, 127], [128])
CONFIGS = {
    "one reach": LlamaConfig(**{**SIZES, "max_position_embeddings": 4096}),
    "a window": MistralConfig(**{**SIZES, "max_position_embeddings": 4096}, sliding_window=16),
}


def build(config):
    torch.manual_seed(0)
    # The attention is in the configuration of the model.
    return AutoModelForCausalLM.from_config(copy.deepcopy(config))


def packed(*rows):
    positions = [[place for size in sizes for place in range(size)] for sizes in rows]
    ids = torch.randint(2, 64, (len(rows), len(positions[0])), generator=torch.Generator().manual_seed(1))
    return ids, torch.tensor(positions)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_it_equals_explicit_masks(config):
    ids, positions = packed(*LENGTHS)
    plain, changed = build(config), build(config)
    assert attend_by_document(changed)
    assert (changed.config._attn_implementation, plain.config._attn_implementation) == (DOCUMENTS, "sdpa")
    results = []
    for model in (plain, changed):
        logits = model(ids, position_ids=positions, use_cache=False).logits
        logits.square().mean().backward()
        results.append((logits.detach(), [weight.grad for weight in model.parameters()]))
    (expected, gradients), (logits, own) = results
    assert torch.allclose(logits, expected, atol=1e-5)
    assert all(torch.allclose(one, two, atol=1e-6) for one, two in zip(gradients, own, strict=True))
    # Each document alone gives the same result, which excludes an error in both masks.
    alone = plain(ids[:1, 44:], use_cache=False).logits
    assert torch.allclose(logits[:1, 44:], alone, atol=1e-5)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.thorough
def test_no_tensor_grows_with_the_square(config):
    length = 2048
    ids, positions = packed([1500, 500, 48])
    sizes = {}
    for is_changed in (True, False):
        model = build(config)
        if is_changed:
            attend_by_document(model)
        with Largest() as largest:
            model.base_model(ids, position_ids=positions, use_cache=False).last_hidden_state.sum().backward()
        sizes[is_changed] = largest.size
    assert sizes[False] >= length**2
    # Two projections of all tokens.
    assert sizes[True] <= 2 * length * SIZES["intermediate_size"]


def test_other_rows_and_caches_are_sdpas(tmp_path):
    model, plain = build(CONFIGS["one reach"]), build(CONFIGS["one reach"])
    attend_by_document(model)
    ids, _ = packed([24])
    mask = torch.ones_like(ids)
    mask[:, :5] = 0
    for given in ({}, {"attention_mask": mask}):
        assert torch.equal(model(ids, **given).logits, plain(ids, **given).logits)
        one, two = (one.generate(ids, max_new_tokens=4, do_sample=False, **given) for one in (model, plain))
        assert torch.equal(one, two)


def test_models_with_custom_attention_are_unchanged():
    eager = build(CONFIGS["one reach"])
    eager.set_attn_implementation("eager")
    assert not attend_by_document(eager)
    assert eager.config._attn_implementation == "eager"


@pytest.mark.parametrize("is_changed", [True, False])
@pytest.mark.thorough
def test_a_square_mask_is_reported(base, tmp_path, monkeypatch, is_changed):
    if not is_changed:
        monkeypatch.setattr(import_module("ctxext.finetune.models"), "attend_by_document", lambda model: False)
    lines = []
    options = change(pack="restart", steps=1)
    tune(base, tmp_path / "out", options, merge=False, notify=lines.append)
    assert any("mask of length × length" in line for line in lines) is not is_changed


SEEN = {
    # It computes positions internally.
    "bloom": BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4),
    # A convolution reads across the border.
    "lfm2": Lfm2Config(**{**SIZES, "max_position_embeddings": 4096}, layer_types=["conv", "full_attention"]),
}
APART = {**CONFIGS, "experts": MixtralConfig(**SIZES, num_local_experts=4)}


@pytest.mark.parametrize("config", [*APART.values(), *SEEN.values()], ids=[*APART, *SEEN])
def test_what_keeps_documents_apart_is_tried(config):
    model = build(config)
    attend_by_document(model)
    assert can_separate_documents(model, None if "bloom" in config.model_type else 0) is (config in APART.values())
    assert model.training


def test_a_model_that_mixes_documents_is_refused(base, tmp_path, monkeypatch):
    monkeypatch.setattr(import_module("ctxext.finetune.prepare"), "can_separate_documents", lambda model, first: False)
    options = change(pack="restart", steps=1)
    with pytest.raises(CtxextError, match="cannot separate documents"):
        tune(base, tmp_path / "out", options, merge=False)
