"""Families whose exponents run over more dimensions than rotate (Gemma 4, LFM3): formulas written out from the papers.

With proportional frequencies pair i of a head of h dimensions has theta_i = base^(-2i/h), and only the first ones
rotate.
"""

import math

import pytest
import torch

from by_hand import by_hand
from ctxext.checkpoint.families import FAMILIES
from ctxext.portable.mspoe import head_frequencies
from ctxext.recipes.methods.adaptive import Adaptive
from ctxext.recipes.methods.mspoe import MsPoE
from ctxext.recipes.model_config import model_config
from ctxext.recipes.registry import method_named
from ctxext.verify.rotation import reference_of

WIDER = [name for name, family in FAMILIES.items() if family.plain_type != "default" and not family.reason]


def wide(name):
    family = FAMILIES[name]
    config = {"model_type": name}
    if family.text_config:
        config[family.text_config] = {"model_type": f"{name}_text"}
    return model_config(config)


def yarn(base, span, pairs, length, factor):
    return by_hand("ntk-by-parts", factor, base, 2 * pairs, length, length, span)[0]


def test_the_list_of_families_is_whole():
    assert {"gemma4", "gemma4_text", "gemma4_unified", "lfm3"} <= set(WIDER)


@pytest.mark.parametrize("name", WIDER)
def test_adaptive_around_yarn_keeps_what_rotates_often(name):
    model = wide(name)
    rotary = model.rotary
    assert rotary.dim < rotary.span
    settings = Adaptive(factor=4.0).settings(model)
    for factor, row in zip(settings["factors"], settings["inverse_frequencies"], strict=True):
        length = rotary.trained_length
        assert row == pytest.approx(yarn(rotary.theta, rotary.span, rotary.dim // 2, length, factor), rel=1e-12)
        for plain, slowed in zip(settings["base"], row, strict=True):
            rotations = plain * length / (2 * math.pi)
            assert slowed == pytest.approx(plain, rel=1e-12) or rotations < 32 * 1.05


@pytest.mark.parametrize("name", ["yarn", "ntk-by-parts"])
def test_references_of_ramps_count_over_the_span(name):
    model = {"theta": 1e6, "dim": 128, "span": 512, "length": 131072}
    numbers = {"factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0}
    found, _ = reference_of(method_named(name)).schedule(numbers, model, None)
    expected = yarn(1e6, 512, 64, 131072, 4.0)
    assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("schedule", ["ntk", "by-parts", "linear"])
@pytest.mark.parametrize("name", WIDER)
def test_ratios_are_spread_over_the_pairs_that_rotate(name, schedule):
    model = wide(name)
    rotary = model.rotary
    pairs, size = rotary.dim // 2, rotary.span // 2
    settings = MsPoE(ratio_max=1.8, head_order="fixed", first_layer=0, schedule=schedule).settings(model)
    plain = [rotary.theta ** (-2 * i / rotary.span) for i in range(pairs)]
    inverse = torch.tensor(plain + [0.0] * (size - pairs))
    found = head_frequencies(settings, inverse)
    assert not found[:, pairs:].any()
    expected = {
        "ntk": [theta / 1.8 ** (i / (pairs - 1)) for i, theta in enumerate(plain)],
        "linear": [theta / 1.8 for theta in plain],
    }
    if schedule != "by-parts":
        assert found[-1, :pairs].tolist() == pytest.approx(expected[schedule], rel=1e-5)
    ratios = [settings["ratios"][-1]]
    rotation = reference_of(MsPoE).rotation(settings, ratios, 0, torch.zeros(1), inverse.tolist(), rotary.theta)[1]
    assert found[-1].tolist() == pytest.approx(rotation, rel=1e-5)
