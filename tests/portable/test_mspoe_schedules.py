"""Frequency schedules per head: each equals a native rope type at a uniform ratio, and composes with any other."""

import functools
import json
import math
import shutil

import pytest
import torch

from ctxext.recipes.registry import method_named
from loaded_models import logits
from portable_checkpoints import convert, llama, load, tokens, write
from small_llama import read_json

BASES = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "longrope": {
        "rope_type": "longrope", "factor": 4.0, "short_factor": [1.0] * 8, "long_factor": [1.5] * 8,
        "original_max_position_embeddings": 64,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return llama(tmp_path_factory.mktemp("schedules") / "source")


@pytest.fixture(scope="module")
def stock(source, tmp_path_factory):
    """A checkpoint with each schedule of `BASES`, and its logits for 40 and for 300 tokens."""
    place = tmp_path_factory.mktemp("schedules")

    @functools.cache
    def get(base):
        folder = native(source, place / base, BASES[base])
        return folder, logits_of(load(folder), 40, 300)

    return get


def native(source, target, schedule, **changes):
    """The same weights with a schedule that transformers carries itself, in both dialects."""
    shutil.copytree(source, target)
    config = json.loads((target / "config.json").read_text())
    theta = changes.pop("rope_theta", 10000.0)
    config |= {"rope_theta": theta, "rope_parameters": {**schedule, "rope_theta": theta}, **changes}
    config.pop("rope_scaling", None)
    if schedule["rope_type"] != "default":
        config["rope_scaling"] = schedule
    if schedule["rope_type"] == "longrope":
        config["original_max_position_embeddings"] = schedule["original_max_position_embeddings"]
    (target / "config.json").write_text(json.dumps(config))
    return target


IDS = tokens(300)


def logits_of(model, *lengths):
    return [logits(model, tokens(length)) for length in lengths]


@pytest.mark.parametrize("order", ["prompt", "fixed"])
def test_linear_is_position_interpolation(source, tmp_path, order):
    expected = logits(native(source, tmp_path / "pi", {"rope_type": "linear", "factor": 4.0}), IDS)
    converted = logits(
        convert(source, tmp_path / "out", ratio_min=4.0, ratio_max=4.0, first_layer=0, head_order=order), IDS
    )
    assert torch.equal(converted, expected)


def test_ntk_is_a_raised_base(source, tmp_path):
    expected = logits(native(source, tmp_path / "ntk", BASES["default"], rope_theta=10000.0 * 4 ** (16 / 14)), IDS)
    converted = logits(
        convert(source, tmp_path / "out", ratio_min=4.0, ratio_max=4.0, first_layer=0, schedule="ntk"), IDS
    )
    torch.testing.assert_close(converted, expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize(
    ("fast", "slow", "length", "theta"),
    [
        (8.0, 1.0, 256, 10000.0),
        (32.0, 1.0, 256, 10000.0),
        (32.0, 0.01, 640, 100.0),  # A base so small that the ramp would end past the head; transformers clamps it too.
    ],
)
@pytest.mark.thorough
def test_by_parts_is_yarn_without_temperature(source, tmp_path, fast, slow, length, theta):
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": length}
    yarn |= {"beta_fast": fast, "beta_slow": slow, "attention_factor": 1.0}
    plain = native(source, tmp_path / "plain", BASES["default"], rope_theta=theta, max_position_embeddings=length)
    options = {"ratio_min": 4.0, "ratio_max": 4.0, "first_layer": 0, "schedule": "by-parts"}
    converted = logits(convert(plain, tmp_path / "out", ramp_fast=fast, ramp_slow=slow, **options), IDS)
    expected = logits(native(plain, tmp_path / "yarn", yarn, rope_theta=theta), IDS)
    assert (expected - logits(plain, IDS)).abs().max() > 0.01, "the ramp must change something"
    torch.testing.assert_close(converted, expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("schedule", ["linear", "ntk", "by-parts"])
@pytest.mark.parametrize("base", BASES)
def test_ratio_1_changes_nothing_on_any_base(stock, tmp_path, base, schedule):
    folder, expected = stock(base)
    options = {"ratio_min": 1.0, "ratio_max": 1.0, "first_layer": 0, "schedule": schedule}
    converted = load(convert(folder, tmp_path / "out", **options))
    assert all(map(torch.equal, logits_of(converted, 40, 300), expected))


@pytest.mark.parametrize("base", BASES)
def test_a_ratio_composes_with_any_base(stock, tmp_path, base):
    folder, _ = stock(base)
    slowed = load(folder)
    forward = slowed.model.rotary_emb.forward

    def quarter(x, position_ids):
        forward(x, position_ids)  # Applies the base's own length rule first.
        rotary = slowed.model.rotary_emb
        angles = position_ids[..., None].float() * (rotary.inv_freq / 4)
        angles = torch.cat((angles, angles), -1)
        return angles.cos() * rotary.attention_scaling, angles.sin() * rotary.attention_scaling

    slowed.model.rotary_emb.forward = quarter
    converted = logits(convert(folder, tmp_path / "out", ratio_min=4.0, ratio_max=4.0, first_layer=0), IDS)
    torch.testing.assert_close(converted, logits_of(slowed, 300)[0], rtol=1e-4, atol=1e-4)


def test_longrope_keeps_its_factor_at_a_longer_context(source, tmp_path):
    """transformers works the factor out from the length that config.json claims, which is another one now."""
    schedule = {key: value for key, value in BASES["longrope"].items() if key != "factor"}
    folder = native(source, tmp_path / "base", schedule)
    longer = write(shutil.copytree(folder, tmp_path / f"out_{tmp_path.name}"), method_named("self-extend")(factor=2))
    assert read_json(longer / "config.json")["max_position_embeddings"] == 512
    scaling = [load(one).model.rotary_emb.attention_scaling for one in (folder, longer)]
    assert scaling == pytest.approx([(1 + math.log(256 / 64) / math.log(64)) ** 0.5] * 2)


def test_positions_in_the_middle(source, tmp_path):
    options = {"first_layer": 0, "rescale": "middle", "rescale_start": 20, "rescale_end": 60, "head_order": "fixed"}
    model = load(convert(source, tmp_path / "out", **options))
    rotary = model.model.rotary_emb
    with torch.no_grad():
        tables, _ = rotary(torch.zeros(1), torch.arange(100)[None])
    # The first column turns by one radian per position, so its angle is the position itself.
    cos, sin = tables.sets[0][0][1][:, 0].chunk(2, -1)
    angles = torch.atan2(sin[..., 0], cos[..., 0]).double()
    for number, ratio in enumerate(model.config.ctxext_code["steps"][0]["ratios"]):
        steps = angles[number].diff().remainder(2 * torch.pi)
        expected = torch.ones(99, dtype=torch.double)
        expected[20:60] = 1 / ratio
        torch.testing.assert_close(steps, expected, rtol=0, atol=1e-4)
    ids = tokens(100)
    with torch.no_grad():
        whole = model(ids).logits
        cache = model(ids[:, :50], use_cache=True).past_key_values
        rest = model(ids[:, 50:], past_key_values=cache).logits
    torch.testing.assert_close(rest, whole[:, 50:], rtol=1e-4, atol=1e-4)


def test_middle_of_nothing_is_the_source(source, tmp_path):
    options = {"first_layer": 0, "rescale": "middle", "rescale_start": 500, "rescale_end": 600}
    assert torch.equal(logits(convert(source, tmp_path / "out", **options), IDS), logits(source, IDS))


def test_layers_before_the_first_are_untouched(source, tmp_path):
    base = {"output_hidden_states": True}
    with torch.no_grad():
        plain = load(source)(tokens(40), **base).hidden_states
        changed = load(convert(source, tmp_path / "out", first_layer=2))(tokens(40), **base).hidden_states
    assert torch.equal(plain[2], changed[2])
    assert not torch.equal(plain[3], changed[3])
