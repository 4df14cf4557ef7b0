"""Every rotary family with a relation map: short inputs are the source's, bit by bit, and long ones change.

A family is either refused with a reason, or it passes: rows inside L bit-equal, rows beyond it changed, and the same
logits from a cache. On some of them the loaded logits are compared with the references, as a conversion does.
"""

import json

import pytest
import torch

import tiny_models
from ctxext.converters import convert
from ctxext.errors import CtxextError
from ctxext.recipes import Recipe
from ctxext.recipes.methods.adaptive import Adaptive
from ctxext.recipes.methods.dual_chunk import DualChunk
from ctxext.recipes.methods.self_extend import SelfExtend
from portable_checkpoints import MODERN, load
from test_families_mspoe import plain_source

LENGTH, TOTAL = 64, 160
QUICK = ["llama", "qwen3", "gemma3_text", "phi3", "glm", "cohere", "gemma2", "gpt_oss"]
COMPARED = {"llama": SelfExtend, "glm": DualChunk, "stablelm": SelfExtend, "cohere": Adaptive, "gemma2": DualChunk}
MINIMUM = 80
CACHE_DIFFERS = ("minimax", "moshi") if MODERN else ("minimax", "lfm2")
"""Families whose stock logits after a cache are others than without one: MiniMax's lightning attention and LFM2's
convolutions take several new tokens otherwise, and Moshi's window is another one."""
NOT_CAUSAL = () if MODERN else ("doge",)
"""Families whose stock rows change with the tokens after them."""


def step(kind):
    return kind(factor=4) if kind is not SelfExtend else SelfExtend(factor=4, window=8)


@torch.no_grad()
def check(model_type, folder, kind=SelfExtend):
    """Run the checks, or return why the family is refused."""
    source, _ = plain_source(model_type, folder / "source")
    ids = torch.randint(3, 128, (2, TOTAL), generator=torch.Generator().manual_seed(0))
    try:
        convert(str(source), folder / f"{model_type}_map", Recipe([step(kind)]), check=False)
    except CtxextError as error:
        return str(error)
    stock, model = load(source), load(folder / f"{model_type}_map")
    inside = ids[:, : LENGTH // 2]
    assert torch.equal(model(input_ids=inside).logits, stock(input_ids=inside).logits), (
        "short inputs are not the source"
    )
    wanted, changed = stock(input_ids=ids).logits, model(input_ids=ids).logits
    torch.testing.assert_close(changed[:, : LENGTH - 1], wanted[:, : LENGTH - 1], rtol=1e-5, atol=1e-5)
    assert (changed[:, LENGTH + 8 :] - wanted[:, LENGTH + 8 :]).abs().max() > 1e-3, "long inputs change nothing"
    if (rest := continues(stock, ids)) is not None:
        is_same = torch.allclose(rest, wanted[:, 100:], rtol=1e-3, atol=1e-3)
        assert is_same != (model_type in CACHE_DIFFERS), "the source's own cache gives other logits"
        if is_same:
            rest = continues(model, ids)
            torch.testing.assert_close(rest, changed[:, 100:], rtol=1e-3, atol=1e-3, msg="a cache gives other logits")
    return ""


def continues(model, ids):
    """The logits after 100 tokens in a cache; None where the family itself cannot go on from one with many."""
    if getattr(model, "_is_stateful", False):
        return None
    try:
        cache = model(input_ids=ids[:, :100], use_cache=True).past_key_values
        return None if cache is None else model(input_ids=ids[:, 100:], past_key_values=cache, use_cache=True).logits
    except (RuntimeError, ValueError, AttributeError):
        return None


@pytest.mark.parametrize("model_type", QUICK)
def test_family(model_type, tmp_path):
    if model_type not in tiny_models.FAMILIES:
        pytest.skip(f"this transformers has no {model_type}")
    assert check(model_type, tmp_path) == ""


@pytest.mark.parametrize("model_type", COMPARED)
def test_the_loaded_logits_are_those_of_the_reference(model_type, tmp_path):
    if model_type == "stablelm" and not MODERN:
        pytest.skip("in transformers 4.57 its attention is its own, which loading says")
    source, _ = plain_source(model_type, tmp_path / "source")
    done = convert(str(source), tmp_path / "out", Recipe([step(COMPARED[model_type])]))
    assert done.verification is not None
    assert not done.verification.skipped
    assert done.verification.change > 1e-2


def test_families_that_the_hook_cannot_reach_are_named(tmp_path):
    for model_type in ("falcon", "deepseek_v3"):
        source, config = plain_source(model_type, tmp_path / model_type)
        with pytest.raises(CtxextError, match=rf'"{model_type}" cannot carry self-extend: '):
            convert(str(source), tmp_path / "out", Recipe([SelfExtend(factor=4, window=8)]))
        assert json.loads((source / "config.json").read_text())["model_type"] == config["model_type"]


@pytest.mark.slow
def test_all_families(tmp_path):
    passed, refused, failed = [], {}, {}
    for model_type in tiny_models.FAMILIES:
        if model_type in NOT_CAUSAL:
            continue
        try:
            reason = check(model_type, tmp_path / model_type)
        except ValueError as error:  # Classes of 4.57 that the code refuses when it is loaded.
            if MODERN or "of transformers 4.57" not in str(error):
                raise
            reason = str(error)
        except Exception as error:
            failed[model_type] = f"{type(error).__name__}: {error}".splitlines()[0]
            continue
        if reason:
            refused[model_type] = reason
        else:
            passed.append(model_type)
    print(f"{len(passed)} of {len(tiny_models.FAMILIES)} families carry relation maps:", *passed)  # noqa: T201
    print(*(f"{name}: {reason}" for name, reason in refused.items()), sep="\n")  # noqa: T201
    print(*(f"FAILED {name}: {reason}" for name, reason in failed.items()), sep="\n")  # noqa: T201
    assert failed == {}
    if MODERN:
        assert len(passed) >= MINIMUM
