"""The check in a clean process: what it must not let through."""

import json
import math
import re
from types import SimpleNamespace

import pytest
import torch

from ctxext.checkpoint.opening import open_checkpoint
from ctxext.converters import convert
from ctxext.converters.plan import make_plan
from ctxext.errors import CtxextError
from ctxext.recipes import MsPoE, Recipe
from ctxext.verify import clean_load, clean_process, logits
from ctxext.verify.logits import compare_logits


def test_logits_that_are_a_little_off_are_refused(llama_source, tmp_path):
    """A checkpoint whose largest ratio is a hundredth off what the recipe asks for."""
    source = open_checkpoint(str(llama_source))
    convert(str(llama_source), tmp_path / "out", recipe(1.82), check=False)
    asked = make_plan(source, recipe(1.8))
    with pytest.raises(CtxextError, match="logits differ") as refusal:
        compare_logits(tmp_path / "out", source, asked.recipe, asked.model, asked.stock)
    (relative,) = re.findall(r"by (\S+) from", refusal.value.message)
    assert float(relative) < 0.05, "not so far off that anything would notice"


def recipe(ratio_max: float) -> Recipe:
    return Recipe([MsPoE(ratio_max=ratio_max, first_layer=0, head_order="fixed")])


def test_a_fault_of_the_reference_is_not_told_as_one_of_the_model(llama_source, tmp_path, monkeypatch):
    broken = tmp_path / "broken.py"
    broken.write_text(
        "def rotation(*numbers):\n    return None\n\ndef choose(*seen):\n    raise IndexError('planted')\n"
    )
    monkeypatch.setattr(logits, "reference_file", lambda step: broken)
    with pytest.raises(
        CtxextError, match=r"The reference of mspoe fails: IndexError: planted \(broken.py, line 5\)"
    ) as refusal:
        convert(str(llama_source), tmp_path / "out", recipe(1.8))
    assert "Nothing is known to be wrong with the checkpoint" in refusal.value.hint


def test_a_model_that_does_not_load_is_told_as_that(llama_source, tmp_path):
    source = open_checkpoint(str(llama_source))
    convert(str(llama_source), tmp_path / "out", recipe(1.8), check=False)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    config["ctxext_code"]["steps"][0]["method"] = "planted"
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    asked = make_plan(source, recipe(1.8))
    with pytest.raises(CtxextError, match="does not load in a clean process: KeyError: 'planted'"):
        compare_logits(tmp_path / "out", source, asked.recipe, asked.model, asked.stock)


@pytest.mark.parametrize("key", ["difference", "attention"])
def test_what_is_no_number_is_refused(key, llama_source, tmp_path, monkeypatch):
    comparison = {"difference": 0.0, "scale": 1.0, "change": 0.0, "attention": 0.0, key: math.nan}
    result = SimpleNamespace(returncode=0, stdout=f"loaded\n{json.dumps(comparison)}\n", stderr="")
    monkeypatch.setattr(clean_load, "run_isolated", lambda *_words: result)
    with pytest.raises(CtxextError, match="by nan from what the method says"):
        convert(str(llama_source), tmp_path / "out", recipe(1.8))


def test_a_layer_that_answers_no_number_is_seen():
    there = torch.ones(1, 2, 3)
    for answers in ([there * math.nan, there], [there, there * math.nan]):
        assert math.isnan(clean_process.largest_difference(answers, [there, there]))
    assert clean_process.largest_difference([there, there * 1.5], [there, there]) == 0.5
