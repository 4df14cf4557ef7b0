"""Models that came with a schedule: what stands on it leaves it alone; what replaces it says so and keeps the rest."""

import functools
import json
import math

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ctxext.api import Recipe, convert
from ctxext.checkpoint.opening import open_checkpoint
from ctxext.converters.plan import make_plan
from ctxext.errors import CtxextError
from ctxext.methods import MsPoE, PositionInterpolation, Yarn
from ctxext.recipes.encodings.frequencies import inverse_frequencies
from ctxext.recipes.encodings.rotary import attention_scaling
from ctxext.recipes.methods.adaptive import Adaptive
from ctxext.recipes.methods.self_extend import SelfExtend
from ctxext.recipes.model_config import model_config
from loaded_models import load, logits
from small_llama import read_json, scheduled
from tiny_models import build

MSCALE = {"mscale": 1.0, "mscale_all_dim": 0.5}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 8.0, "beta_slow": 0.5}
SHAPES = {
    "llama-3.1": ("llama", {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}, 32),
    "yarn-mscale": ("llama", {**YARN, **MSCALE}, 32),
    "deepseek-v3": ("deepseek_v3", {**YARN, **MSCALE}, 32),
    "gpt-oss": ("gpt_oss", {**YARN, "truncate": False}, 32),
    "phi-3-128k": (
        "phi3",
        {"type": "longrope", "short_factor": [1.0, 1.1] * 4, "long_factor": [1.0 + i for i in range(8)]},
        32,
    ),
    "gemma-3": ("gemma3_text", {"rope_type": "linear", "factor": 8.0}, None),
}
"""The schedule as the files of these models have it, and their original length in tokens; they read 128."""

SHORT, LONG = 20, 100


def published(name, folder):
    """A tiny random checkpoint with a published schedule, its config.json written as the model's makers wrote it."""
    model_type, schedule, original = SHAPES[name]
    build(model_type).save_pretrained(folder)
    is_gemma, is_phi = model_type == "gemma3_text", model_type == "phi3"
    inside = {"original_max_position_embeddings": original} if original and not is_phi else {}
    beside = {"original_max_position_embeddings": original, "sliding_window": None} if is_phi else {}
    beside |= {"rope_local_base_freq": 1e4} if is_gemma else {}
    theta = 1e6 if is_gemma else 1e4
    return scheduled(
        folder, max_position_embeddings=128, rope_theta=theta, rope_scaling={**schedule, **inside}, **beside
    )


def logits_at(folder, *lengths):
    model = load(folder)
    return [logits(model, 3 + torch.arange(length)[None] % 100) for length in lengths]


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A checkpoint with each published schedule, which no test may change, and its logits."""
    place = tmp_path_factory.mktemp("trained")

    @functools.cache
    def get(name):
        folder = published(name, place / name)
        return folder, logits_at(folder, SHORT, LONG)

    return get


def assert_equal_inside(source, step, out):
    folder, expected = source
    convert(str(folder), out, Recipe([step]), check=False)
    assert all(map(torch.equal, logits_at(out, SHORT, LONG), expected))


NEUTRAL = {
    "mspoe": MsPoE(ratio_min=1, ratio_max=1, head_order="fixed", first_layer=0),
    "self-extend": SelfExtend(factor=1, group=1),
    "adaptive": Adaptive(factor=1),
}


@pytest.mark.parametrize("step", [SelfExtend(factor=2), Adaptive(factor=2)], ids=lambda step: step.name)
def test_a_schedule_that_depends_on_the_input_cannot_be_combined_with_maps(step, tmp_path):
    scheduled(published("llama-3.1", tmp_path), rope_scaling={"rope_type": "dynamic", "factor": 4.0})
    with pytest.raises(CtxextError, match=f"{step.name} depends on the query position"):
        step.edit(model_config(read_json(tmp_path / "config.json")))


@pytest.mark.parametrize("step", [SelfExtend(factor=2), Adaptive(factor=2)], ids=lambda step: step.name)
@pytest.mark.parametrize("name", [name for name in SHAPES if name != "deepseek-v3"])
def test_what_lengthens_a_trained_schedule_is_bit_equal_inside(name, step, sources, tmp_path):
    assert_equal_inside(sources(name), step, tmp_path / "out")
    assert logits_at(tmp_path / "out", 200)[0].isfinite().all()


@pytest.mark.parametrize(
    "step", [SelfExtend(factor=2), MsPoE(head_order="fixed", first_layer=0)], ids=lambda step: step.name
)
def test_longrope_passes_the_check_after_converting(step, sources, tmp_path):
    source, _ = sources("phi-3-128k")
    done = convert(str(source), tmp_path / "out", Recipe([step]))
    assert done.verification.difference < 1e-4
    assert done.verification.change > 1e-3
    written = open_checkpoint(tmp_path / "out")
    assert attention_scaling(model_config(written.config).rotary) == math.sqrt(1 + math.log(4) / math.log(32))


@pytest.mark.parametrize(
    ("rope_type", "missing"),
    [
        ("linear", "factor"),
        ("dynamic", "factor"),
        ("yarn", "factor"),
        ("llama3", "factor"),
        ("longrope", "short_factor"),
    ],
)
def test_a_schedule_that_lacks_a_number_is_refused(rope_type, missing):
    llama = {"model_type": "llama", "rope_scaling": {"rope_type": rope_type, "original_max_position_embeddings": 32}}
    with pytest.raises(CtxextError, match=f'"{rope_type}" of config.json lacks "{missing}"'):
        model_config(llama)


@pytest.mark.parametrize("step", NEUTRAL.values(), ids=NEUTRAL)
@pytest.mark.parametrize("name", [name for name in SHAPES if name != "deepseek-v3"])
def test_what_changes_nothing_is_bit_equal_on_a_trained_schedule(name, step, sources, tmp_path):
    assert_equal_inside(sources(name), step, tmp_path / "out")


def test_shared_keys_still_refuse_what_moves_them(sources, tmp_path):
    source, _ = sources("deepseek-v3")
    for step in NEUTRAL.values():
        with pytest.raises(CtxextError, match="latent attention"):
            convert(str(source), tmp_path / "out", Recipe([step]))


@pytest.mark.parametrize("name", ["yarn-mscale", "deepseek-v3", "gpt-oss"])
@pytest.mark.thorough
def test_the_same_yarn_again_keeps_what_it_does_not_name(name, sources, tmp_path):
    source, expected = sources(name)
    plain = convert(str(source), tmp_path / "out", Recipe([Yarn(factor=4)]), replace_scaling=True)
    assert all(map(torch.equal, logits_at(tmp_path / "out", SHORT, LONG), expected))
    kept = "truncate False" if name == "gpt-oss" else "mscale 1.0, mscale_all_dim 0.5"
    assert kept in plain.plan.cautions[0]
    convert(str(source), tmp_path / "given", Recipe([Yarn(factor=4, beta_fast=16)]), replace_scaling=True)
    assert read_json(tmp_path / "given" / "config.json")["rope_scaling"]["beta_fast"] == 16


@pytest.mark.parametrize("name", SHAPES)
def test_the_formulas_are_those_of_the_loaded_model(name, sources, tmp_path):
    source, _ = sources(name)
    rotary = model_config(read_json(source / "config.json")).rotary
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    modules = dict(model.named_modules())
    (module,) = [one for place, one in modules.items() if place.endswith("rotary_emb")][:1]
    layer = "full_attention_" if hasattr(module, "full_attention_inv_freq") else ""
    module(torch.zeros(1, 1, 1), torch.arange(LONG)[None], **({"layer_type": "full_attention"} if layer else {}))
    inverse = getattr(module, f"{layer}inv_freq")
    wanted = torch.tensor(inverse_frequencies(rotary, LONG))
    torch.testing.assert_close(inverse.float(), wanted, rtol=1e-5, atol=0)
    assert getattr(module, f"{layer}attention_scaling") == pytest.approx(attention_scaling(rotary))


def test_adaptive_slows_what_the_schedule_left(sources, tmp_path):
    """Around pi every frequency of a rung is the schedule's own divided by the factor."""
    source, _ = sources("llama-3.1")
    plan = make_plan(open_checkpoint(str(source)), Recipe([Adaptive(factor=4, around="pi")]))
    (settings,) = plan.model.code["steps"]
    assert settings["original_length"] == 128
    assert settings["base"] == inverse_frequencies(model_config(open_checkpoint(str(source)).config).rotary)
    for factor, row in zip(settings["factors"], settings["inverse_frequencies"], strict=True):
        assert row == pytest.approx([one / factor for one in settings["base"]])
    yarn = make_plan(open_checkpoint(str(source)), Recipe([Adaptive(factor=4)])).model.code["steps"][0]
    shares = [new / old for new, old in zip(yarn["inverse_frequencies"][-1], yarn["base"], strict=True)]
    turns = [128 * one / (2 * math.pi) for one in yarn["base"]]
    assert shares == sorted(shares, reverse=True)
    assert all(share == pytest.approx(0.25) for share, turn in zip(shares, turns, strict=True) if turn < 0.5)


def test_replacing_reports_the_removed_schedule_and_its_factor(sources, tmp_path):
    source, _ = sources("llama-3.1")
    with pytest.raises(CtxextError, match="already has a schedule for 128 tokens: llama3 ×8 from 32 tokens") as caught:
        convert(str(source), tmp_path / "out", Recipe([Yarn(factor=8)]))
    assert "start from 32 tokens" in caught.value.hint
    done = convert(str(source), tmp_path / "out", Recipe([Yarn(factor=8)]), replace_scaling=True)
    assert "removed llama3 ×8 from 32 tokens" in done.plan.cautions[0]
    assert "from 128 tokens to 256" in done.plan.cautions[0]


def test_a_linear_schedule_requires_its_original_length(sources, tmp_path):
    source, _ = sources("gemma-3")
    again, step = {"replace_scaling": True, "allow_shorter": True}, Recipe([PositionInterpolation(factor=4)])
    with pytest.raises(CtxextError, match="from an unknown original length") as caught:
        convert(str(source), tmp_path / "out", step, **again)
    assert "--original-length 16" in caught.value.hint
    done = convert(str(source), tmp_path / "out", step, original_length=16, **again)
    assert (done.plan.model.rotary.trained_length, done.plan.model.rotary.context_length) == (16, 64)


@pytest.mark.thorough
def test_code_on_a_trained_schedule_is_removed_before_replacing(sources, tmp_path):
    source, _ = sources("llama-3.1")
    convert(str(source), tmp_path / "mspoe", Recipe([NEUTRAL["mspoe"]]))
    done = convert(str(tmp_path / "mspoe"), tmp_path / "out", Recipe([Yarn(factor=8)]), replace_scaling=True)
    assert (done.plan.model.rotary.rope_type, done.plan.model.rotary.context_length) == ("yarn", 256)
    with pytest.raises(CtxextError, match="supports 128 tokens, but the result would have 64") as caught:
        convert(str(tmp_path / "mspoe"), tmp_path / "short", Recipe([Yarn(factor=2)]), replace_scaling=True)
    assert "--allow-shorter" in caught.value.hint


BESIDE = {
    "flat default": ({"rope_type": "default", "rope_theta": 5e4}, {"rope_type": "linear", "factor": 8.0}),
    "old type": ({"rope_type": "default", "rope_theta": 5e4}, {"type": "linear", "factor": 8.0}),
    "other scaling": (
        {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e4},
        {"rope_type": "dynamic", "factor": 4.0},
    ),
}


@pytest.mark.parametrize("case", BESIDE)
def test_rope_scaling_overrides_rope_parameters(case, llama):
    parameters, scaling = BESIDE[case]
    path = llama / "config.json"
    config = json.loads(path.read_text()) | {"rope_parameters": parameters, "rope_scaling": scaling}
    config.pop("rope_theta", None)
    path.write_text(json.dumps(config))
    rotary, loaded = model_config(config).rotary, AutoConfig.from_pretrained(llama)
    theirs = loaded.rope_scaling if hasattr(loaded, "rope_theta") else loaded.rope_parameters
    their_type = theirs.get("rope_type") or theirs["type"]
    assert (rotary.rope_type, rotary.parameters["factor"]) == (their_type, theirs["factor"])
    assert rotary.theta == (loaded.rope_theta if hasattr(loaded, "rope_theta") else theirs["rope_theta"])
