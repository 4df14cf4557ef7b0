"""The check in a clean process: what it must not let through, and faults of a reference, which name the reference."""

import json
import math
import re
import subprocess
from types import SimpleNamespace

import pytest
import torch

from ctxext.checkpoint.opening import open_checkpoint
from ctxext.converters import convert
from ctxext.converters.plan import make_plan
from ctxext.errors import CtxextError
from ctxext.files import isolated
from ctxext.recipes import MsPoE, PositionInterpolation, Recipe
from ctxext.recipes.encodings.rotary import Rotary
from ctxext.recipes.methods.rerope import ReRope
from ctxext.verify import clean_load, clean_process, logits, reference
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


PLAIN = Rotary(theta=1e4, dim=8, span=8, trained_length=64, context_length=64, parameters={"rope_type": "default"})
ROWS = "def temperature(settings, layer, m):\n    return 1.0\n\n\n"
BROKEN = {
    "relation": (
        ROWS + "def relation(settings, layer, m, n, w):\n    return settings['gone']\n",
        "KeyError: 'gone' (broken.py, line 6)",
    ),
    "places": ("def places(settings, reach):\n    return 1 / 0\n", "ZeroDivisionError: division by zero (broken.py, "),
    "syntax": ("def relation(:\n", "SyntaxError: "),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_fault_of_a_reference_in_the_check_after_converting(kind, llama, tmp_path, monkeypatch):
    text, message = BROKEN[kind]
    (tmp_path / "broken.py").write_text(text)
    for module in (reference, logits):
        monkeypatch.setattr(module, "reference_file", lambda method: tmp_path / "broken.py")
    with pytest.raises(CtxextError) as error:
        convert(str(llama), tmp_path / "out", Recipe([ReRope(factor=4)]))
    assert error.value.message.startswith("The reference of rerope fails: ")
    assert message in error.value.message
    assert "mend the reference" in error.value.hint


@pytest.mark.parametrize("answer", ["numbers['gone'], 1.0", "[1.0]"])
def test_a_fault_of_a_reference_of_a_schedule(answer, tmp_path, monkeypatch):
    (tmp_path / "broken.py").write_text(f"def schedule(numbers, model, at):\n    return {answer}\n")
    monkeypatch.setattr(reference, "reference_file", lambda method: tmp_path / "broken.py")
    with pytest.raises(CtxextError, match=r"The reference of pi fails: (KeyError|ValueError): .* \(broken.py"):
        reference.expected_frequencies([PositionInterpolation(factor=2)], PLAIN, 64)


def test_a_script_s_other_faults_are_its_own():
    said = 'Traceback:\n  File "/a/script.py", line 3, in <module>\n  File "/a/yarn.py", line 7, in f\nKeyError: 1'
    failed = subprocess.CompletedProcess([], 1, "", said)
    assert isolated.fault_within(failed, ["/b/yarn.py"]) is None
    assert isolated.fault_within(failed, ["/a/yarn.py"]) == ("/a/yarn.py", "KeyError: 1 (yarn.py, line 7)")


@pytest.mark.parametrize("place", ["relation", "temperature"])
def test_a_fault_in_a_file_that_a_reference_imports(place, llama, tmp_path, monkeypatch):
    """In the clean process it is a fault of the reference too, whether its own functions call it or the check does."""
    (tmp_path / "shared.py").write_text("def gone(*_):\n    return {}['gone']\n")
    other = "temperature" if place == "relation" else "relation"
    text = f"from .shared import gone as {place}\n\n\ndef {other}(settings, layer, m, n=0, w=(1.0,) * 4):\n"
    (tmp_path / "broken.py").write_text(text + ("    return 1.0\n" if other == "temperature" else "    return w, w\n"))
    monkeypatch.setattr(logits, "reference_file", lambda method: tmp_path / "broken.py")
    with pytest.raises(CtxextError, match=r"reference of rerope fails: KeyError: 'gone' \(shared.py, line 2\)"):
        convert(str(llama), tmp_path / "out", Recipe([ReRope(factor=4)]))


def test_a_reference_is_asked_again_in_each_layer():
    expected = clean_process.Expected.__new__(clean_process.Expected)
    expected.positions, expected.angles = [0, 1], {}
    asked = SimpleNamespace(relation=lambda settings, layer, m, n, w: ([float(layer)], [0.0]))
    for layer in (0, 1, 0):
        expected.layer = layer
        assert expected.pairs({}, asked, (1.0,))[1].unique().tolist() == [float(layer)]
