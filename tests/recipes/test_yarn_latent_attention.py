"""YaRN on latent attention: the temperature of the whole score, as in DeepSeek's configurations."""

import dataclasses
import inspect
import json
import math
from pathlib import Path

import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import tiny_models
from ctxext.api import Recipe, convert, verify
from ctxext.checkpoint.families import FAMILIES
from ctxext.checkpoint.opening import open_checkpoint
from ctxext.converters.engine_support import schedules_of
from ctxext.methods import MsPoE, NtkByParts, Yarn
from ctxext.recipes.model_config import model_config
from ctxext.verify.conversion import Conversion
from ctxext.verify.run import check_scores
from loaded_models import load, logits
from releases import IS_OLDER
from small_llama import read_json

FACTOR, LENGTH = 4, tiny_models.MAX_POSITIONS
TEMPERATURE = 0.1 * math.log(FACTOR) + 1
SCALED = [name for name, family in FAMILIES.items() if family.scales_scores and name != "kimi_k25"]  # It has images.
BUILT = [name for name in SCALED if name in CONFIG_MAPPING]


IDS = torch.arange(2 * LENGTH)[None] * 7 % 90 + 5


def yarn_frequencies(theta, dim):
    """Peng et al. 2023, section 3.2, with ends that are rounded as in transformers, as tensors."""
    pairs = torch.arange(0, dim, 2, dtype=torch.float64)
    plain = theta ** (-pairs / dim)
    ends = [dim * math.log(LENGTH / (turns * 2 * math.pi)) / (2 * math.log(theta)) for turns in (32, 1)]
    low, high = max(math.floor(ends[0]), 0), min(math.ceil(ends[1]), dim - 1)
    slow = ((pairs / 2 - low) / max(high - low, 0.001)).clamp(0, 1)
    return (plain * (1 - slow) + plain / FACTOR * slow).float()


@pytest.mark.parametrize("name", [name for name in ("deepseek_v3", "glm4_moe_lite") if name in CONFIG_MAPPING])
@pytest.mark.thorough
def test_the_whole_score_is_scaled(name, tmp_path):
    """The source with frequencies and a scale of its scores that are set by hand gives the logits of the result."""
    source = tiny_models.save(name, tmp_path / "source")
    convert(str(source), tmp_path / "out", Recipe([Yarn(factor=FACTOR)]))
    by_hand = load(source)
    rotary = by_hand.model.rotary_emb
    rotary.inv_freq.copy_(yarn_frequencies(1e4, 16))
    for layer in by_hand.model.layers:
        attention = layer.self_attn
        assert attention.scaling == pytest.approx(32**-0.5)  # 16 dimensions with, and 16 without rotation.
        attention.scaling = 32**-0.5 * TEMPERATURE**2
    result = logits(load(tmp_path / "out"), IDS, use_cache=False)
    torch.testing.assert_close(result, logits(by_hand, IDS, use_cache=False), atol=1e-4, rtol=1e-4)
    rotary.attention_scaling = TEMPERATURE  # The scores of the rotated dimensions would be scaled once more.
    assert not torch.allclose(result, logits(by_hand, IDS, use_cache=False), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("name", BUILT)
def test_every_family_that_reads_the_key(name, tmp_path):
    source, out = tiny_models.save(name, tmp_path / "source"), tmp_path / "out"
    convert(str(source), out, Recipe([Yarn(factor=FACTOR)]))
    schedule = read_json(out / "config.json")["rope_parameters"]
    assert (schedule["mscale"], schedule["mscale_all_dim"], "attention_factor" in schedule) == (1.0, 1.0, False)
    finding = check_scores(Conversion(open_checkpoint(str(out))))
    files = {inspect.getfile(type(part)) for part in tiny_models.build(name).modules()}
    if not IS_OLDER or any("mscale_all_dim" in Path(file).read_text() for file in files):  # Older ones: not GLM's.
        assert finding.status == "passed"
        assert finding.detail == "the latent attention multiplies all scores by 1.296, as the recipe"
    else:
        assert finding.status == "failed"


def test_only_families_that_read_the_key_in_all_versions():
    assert len(SCALED) + 1 == 13  # And Mistral 4, inside Mistral 3.
    assert all(FAMILIES[name].shared_rotary_key for name in SCALED)
    assert not FAMILIES["deepseek_v2"].scales_scores  # 4.57 does not.
    nested = {"model_type": "mistral3", "text_config": {"model_type": "mistral4", "rope_parameters": {}}}
    assert model_config({**nested, "vision_config": {}}).family.scales_scores


def adapted(step, name="deepseek_v3"):
    model = model_config({"model_type": name, "max_position_embeddings": 4096, "rope_theta": 1e4})
    (step,) = Recipe([step]).resolve(model).steps
    return step


def test_the_users_temperature_comes_first():
    for options in (
        {"attention_factor": 1.2},
        {"mscale": 0.7},
        {"mscale_all_dim": 0.7},
        {"mscale": 2, "mscale_all_dim": 1},
    ):
        step = adapted(Yarn(factor=FACTOR, **options))
        names = ("attention_factor", "mscale", "mscale_all_dim")
        assert {name: getattr(step, name) for name in names} == {**dict.fromkeys(names), **options}
    for name in ("llama", "deepseek_v2"):
        assert adapted(Yarn(factor=FACTOR), name).mscale_all_dim is None
    parts = adapted(NtkByParts(factor=FACTOR))
    assert not any(field.name.startswith("mscale") for field in dataclasses.fields(parts))


def test_a_factor_of_1_changes_nothing(tmp_path):
    source = tiny_models.save("deepseek_v3", tmp_path / "source")
    convert(str(source), tmp_path / "out", Recipe([Yarn(factor=1)]))
    assert torch.equal(logits(load(tmp_path / "out"), IDS, use_cache=False), logits(load(source), IDS, use_cache=False))


@pytest.mark.thorough
def test_verify_finds_another_scale(tmp_path):
    source, out = tiny_models.save("deepseek_v3", tmp_path / "source"), tmp_path / "out"
    convert(str(source), out, Recipe([Yarn(factor=FACTOR)]), digest=True)
    assert {finding.status for finding in verify(out)} == {"passed"}
    subject = Conversion(open_checkpoint(str(out)))
    scores = dict.fromkeys(subject.load_report.scores, 1.0)
    vars(subject)["load_report"] = dataclasses.replace(subject.load_report, scores=scores)
    assert check_scores(subject).status == "failed"
    config = read_json(out / "config.json")
    config["rope_scaling"].pop("mscale_all_dim"), config["rope_parameters"].pop("mscale_all_dim")
    (out / "config.json").write_text(json.dumps(config))
    failed = {finding.check for finding in verify(out) if finding.status == "failed"}
    assert {"files", "frequencies", "scores"} <= failed


def test_engines_know_the_default():
    model = model_config({"model_type": "deepseek_v3", "max_position_embeddings": 4096, "rope_theta": 1e4})
    default = Recipe([Yarn(factor=FACTOR)]).resolve(model).edit(model)
    assert schedules_of(default) == ("yarn",)
    other = Recipe([Yarn(factor=FACTOR, mscale=0.5, mscale_all_dim=1)]).resolve(model).edit(model)
    assert schedules_of(other) == ("yarn with mscale_all_dim",)
    assert MsPoE.refusal(model.config, model.family)
