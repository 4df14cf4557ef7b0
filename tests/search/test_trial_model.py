"""A recipe applied in memory equals the converted and loaded one, and leaves the model unchanged."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import tiny_models
from ctxext.api import METHODS, Recipe, convert
from ctxext.checkpoint.families import family_of
from ctxext.checkpoint.opening import open_checkpoint
from ctxext.errors import CtxextError
from ctxext.methods import AdjustedBase, MsPoE, Yarn
from ctxext.models.model import LoadedModel
from ctxext.models.recipe_applier import RecipeApplier
from ctxext.recipes.model_config import model_config
from loaded_models import logits

QUICK = ("llama", "gemma3_text", "phi3", "gpt_neox", "deepseek_v3", "glm", "gpt_oss", "qwen3")
LENGTHS = (40, 150, 70)
"""Lengths within and beyond the original 64, not in order, because some schedules have state."""


def make_applier(folder: Path, place: Path, dtype=torch.float32) -> RecipeApplier:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    return RecipeApplier(
        LoadedModel("stock", model, None, can_share=False), open_checkpoint(str(folder)), place / "bench"
    )


def logits_of(model) -> list[torch.Tensor]:
    size = model.config.get_text_config().vocab_size
    ids = [torch.arange(3, 3 + length)[None] * 7 % size for length in LENGTHS]
    return [logits(model, one, use_cache=False) for one in ids]


def same(one, other) -> bool:
    return all(torch.equal(ours, theirs) for ours, theirs in zip(one, other, strict=True))


def recipes(folder: Path) -> dict[str, Recipe]:
    """Each method that the family supports in this version, and compositions."""
    config = open_checkpoint(str(folder)).config
    family = family_of(config)
    rotary = model_config(config).rotary
    named = {}
    for method in METHODS:
        if method.name == "distance-aware":  # A search omits it.
            continue
        if method.refusal(config, family):
            continue
        ranges = method.search_space(rotary, 4.0)
        numbers = {name: tried.start for name, tried in ranges.items() if tried.start is not None}
        numbers |= {"first_layer": 0, "schedule": "linear", "head_order": "prompt"} if method is MsPoE else {}
        numbers |= {"theta": 3e5} if method is AdjustedBase else {}
        named[method.name] = Recipe([method.from_search(numbers, rotary, 4.0)])
    if "mspoe" in named and "yarn" in named:
        heads = MsPoE(schedule="by-parts", ratio_min=1.0, ratio_max=3.0, head_order="fixed", first_layer=1)
        named["yarn+mspoe"] = Recipe([AdjustedBase(theta=2e4, factor=4), Yarn(factor=4, attention_factor=1.3), heads])
    return named


def converted(source: Path, out: Path, recipe: Recipe) -> list[torch.Tensor] | None:
    """Output of a checkpoint on disk; None if it is refused."""
    try:
        convert(str(source), out, recipe, check=False)
        options = {"dtype": torch.float32, "trust_remote_code": recipe.needs_code}
        return logits_of(AutoModelForCausalLM.from_pretrained(out, **options).eval())
    except CtxextError:
        return None


def families() -> list:
    marks = {name: () if name in QUICK else pytest.mark.slow for name in tiny_models.FAMILIES}
    return [pytest.param(name, marks=marks[name]) for name in tiny_models.FAMILIES]


@pytest.mark.parametrize("model_type", families())
def test_applied_is_converted_and_loaded(model_type, tmp_path):
    check_applied(model_type, tmp_path)


@pytest.mark.thorough
@pytest.mark.parametrize("model_type", [name for name in tiny_models.FAMILIES if name not in QUICK])
def test_a_tenth_of_the_recipes_applied_is_converted_and_loaded(model_type, tmp_path):
    """A different tenth per family; `make slow` tests all."""
    check_applied(model_type, tmp_path, list(tiny_models.FAMILIES).index(model_type))


def check_applied(model_type, tmp_path, tenth=None):
    source = tiny_models.save(model_type, tmp_path / "source")
    config = open_checkpoint(str(source)).config
    if family_of(config).reason:
        pytest.skip(family_of(config).reason)
    applier = make_applier(source, tmp_path)
    before = logits_of(applier.stock.model)
    by_name = recipes(source)
    if tenth is not None:
        by_name = {name: recipe for at, (name, recipe) in enumerate(by_name.items()) if (at + tenth) % 10 == 0}
    changed = num_carried = 0
    for name, recipe in by_name.items():
        wanted = converted(source, tmp_path / name, recipe)
        if wanted is None:
            with pytest.raises(CtxextError):
                applier.apply(applier.prepare(recipe))
            continue
        applied = logits_of(applier.apply(applier.prepare(recipe)).model)
        assert same(applied, wanted), name
        num_carried += 1
        changed += not same(applied, before)
    assert same(logits_of(applier.stock.model), before)
    assert changed == num_carried > 0 or model_type not in QUICK


def test_a_trial_shares_every_weight_and_changes_none(tmp_path):
    source = tiny_models.save("llama", tmp_path / "source")
    applier = make_applier(source, tmp_path)
    weights = {name: tensor.clone() for name, tensor in applier.stock.model.state_dict().items()}
    model = applier.apply(Recipe([Yarn(factor=4)])).model
    mine, theirs = dict(model.named_parameters()), dict(applier.stock.model.named_parameters())
    assert mine.keys() == theirs.keys()
    assert all(tensor.data_ptr() == theirs[name].data_ptr() for name, tensor in mine.items())
    assert all(torch.equal(tensor, weights[name]) for name, tensor in applier.stock.model.state_dict().items())


def test_16_bit_models_keep_their_frequencies_in_32(tmp_path):
    source = tiny_models.save("llama", tmp_path / "source")
    applier = make_applier(source, tmp_path, torch.bfloat16)
    convert(str(source), tmp_path / "out", Recipe([Yarn(factor=4)]))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16).eval()
    assert same(logits_of(applier.apply(Recipe([Yarn(factor=4)])).model), logits_of(loaded))


@pytest.mark.thorough
def test_a_calibrated_order_is_the_one_that_converting_measures(applier, source, tmp_path):
    recipe = Recipe([Yarn(factor=4), MsPoE(head_order="calibrated", first_layer=0, ratio_max=3.0)])
    prepared = applier.prepare(recipe)
    assert prepared.steps[-1].ranks is not None
    done = convert(str(source), tmp_path / "out", recipe, check=False)
    assert prepared.to_dict() == done.plan.recipe.to_dict()
    again = convert(str(source), tmp_path / "again", prepared, check=False)
    assert again.plan.model.config == done.plan.model.config


def test_a_model_with_other_weights_than_its_family_is_refused(tmp_path):
    source = tiny_models.save("llama", tmp_path / "source")
    applier = make_applier(source, tmp_path)
    del applier.stock.model.model.layers[0].mlp.up_proj
    with pytest.raises(CtxextError, match="cannot be applied"):
        applier.apply(Recipe([Yarn(factor=4)]))
