"""T5's buckets: what the loaded model looks up is what the formula says, in encoders and decoders."""

import json

import pytest
import torch

from ctxext.api import Recipe, convert, verify
from ctxext.checkpoint.opening import open_checkpoint
from ctxext.converters.inspection import inspect_checkpoint
from ctxext.errors import CtxextError
from ctxext.recipes.methods.buckets import WiderBuckets
from ctxext.recipes.model_config import model_config
from ctxext.verify.conversion import Conversion
from ctxext.verify.run import check_buckets
from small_llama import read_json
from tiny_encodings import BUCKETS, LENGTH, load, logits, save

FACTOR = 4


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    place = tmp_path_factory.mktemp("buckets")
    return {name: save(name, place / name) for name in BUCKETS}


def test_every_family_has_a_model():
    from ctxext.checkpoint.families import FAMILIES

    assert set(BUCKETS) == {name for name, family in FAMILIES.items() if family.positions == "buckets"}


@pytest.mark.parametrize("name", BUCKETS)
def test_a_family(name, sources, tmp_path):
    done = convert(str(sources[name]), tmp_path / "out", Recipe([WiderBuckets(factor=FACTOR)]))
    old, new = read_json(sources[name] / "config.json"), read_json(tmp_path / "out" / "config.json")
    changed = {"relative_attention_max_distance": FACTOR * 16, "n_positions": FACTOR * LENGTH}
    assert {key: new[key] for key in new if new[key] != old.get(key) and key != "ctxext"} == changed
    assert json.loads((tmp_path / "out/tokenizer_config.json").read_text())["model_max_length"] == FACTOR * LENGTH
    assert any("not measured" in caution for caution in done.plan.cautions)
    before, after = load(sources[name]), load(tmp_path / "out")
    near = 16 // 4  # Distances that have a bucket of their own in an encoder.
    assert torch.equal(logits(before, near), logits(after, near))
    assert not torch.allclose(logits(before, 3 * LENGTH), logits(after, 3 * LENGTH), atol=1e-2, rtol=1e-2)
    findings = verify(str(tmp_path / "out"), against=str(sources[name]), load=False)
    assert {one.status for one in findings} <= {"passed", "not checked"}, findings
    seen = inspect_checkpoint(open_checkpoint(str(tmp_path / "out")))
    assert (seen.model.encoding.context_length, seen.model.encoding.distance) == (FACTOR * LENGTH, FACTOR * 16)
    assert [method for method, reason in seen.methods.items() if not reason] == ["buckets"]


@pytest.mark.parametrize("name", ["t5", "longt5", "umt5"])
@pytest.mark.thorough
def test_verify_builds_the_family_and_compares(name, sources, tmp_path):
    convert(str(sources[name]), tmp_path / "out", Recipe([WiderBuckets(factor=FACTOR)]))
    finding = check_buckets(Conversion(open_checkpoint(str(tmp_path / "out"))))
    assert finding.status == "passed", finding
    assert "in 2 stacks" in finding.detail


def test_another_distance_is_found(sources, tmp_path):
    convert(str(sources["t5"]), tmp_path / "out", Recipe([WiderBuckets(factor=FACTOR)]))
    config = {**read_json(tmp_path / "out" / "config.json"), "relative_attention_max_distance": 50}
    (tmp_path / "out/config.json").write_text(json.dumps(config))
    assert check_buckets(Conversion(open_checkpoint(str(tmp_path / "out")))).status == "failed"
    statuses = {one.check: one.status for one in verify(str(tmp_path / "out"), load=False)}
    assert statuses["configuration"] == "failed"


def test_it_is_replaced_and_not_stacked(sources, tmp_path):
    convert(str(sources["t5"]), tmp_path / "once", Recipe([WiderBuckets(factor=FACTOR)]))
    with pytest.raises(CtxextError, match="already extended"):
        convert(str(tmp_path / "once"), tmp_path / "twice", Recipe([WiderBuckets(factor=2)]))
    convert(str(tmp_path / "once"), tmp_path / "twice", Recipe([WiderBuckets(factor=8)]), replace_scaling=True)
    assert read_json(tmp_path / "twice" / "config.json")["relative_attention_max_distance"] == 8 * 16


@pytest.mark.thorough
def test_an_encoder_alone(tmp_path):
    source = save(
        "t5", tmp_path / "source", name="T5EncoderModel", more={"is_encoder_decoder": False, "use_cache": False}
    )
    convert(str(source), tmp_path / "out", Recipe([WiderBuckets(target_length=FACTOR * LENGTH)]))
    statuses = {one.check: one.status for one in verify(str(tmp_path / "out"))}
    assert statuses["loading"] == statuses["buckets"] == "passed", statuses


@pytest.mark.parametrize(("name", "length"), [("t5", 512), ("mt5", 1024), ("longt5", 4096)])
def test_the_default_length_of_each_family_with_buckets(name, length):
    assert model_config({"model_type": name}).encoding.trained_length == length
    with pytest.raises(CtxextError, match="relative_attention_max_distance"):
        model_config({"model_type": name, "relative_attention_max_distance": -1})
    assert model_config({"model_type": name}).encoding.distance == 128
