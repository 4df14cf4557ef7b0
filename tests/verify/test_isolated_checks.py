"""The check in a clean process: what it must not let through, and faults of a reference, which name the reference."""

import json
import math
import re
import shutil
import subprocess
from types import SimpleNamespace

import pytest
import torch

import tiny_models
from ctxext.api import Recipe, convert
from ctxext.checkpoint.opening import open_checkpoint
from ctxext.converters.plan import make_plan
from ctxext.errors import CtxextError
from ctxext.files import isolated
from ctxext.methods import MsPoE, PositionInterpolation
from ctxext.recipes.encodings.rotary import Rotary
from ctxext.recipes.methods.rerope import ReRope
from ctxext.recipes.registry import method_named
from ctxext.verify import decoding_process, isolated_checks, isolated_process, model_process, rotation
from ctxext.verify.forms_process import Way, run_calls
from ctxext.verify.isolated_checks import compare_logits
from ctxext.verify.references import REFERENCES

pytestmark = pytest.mark.usefixtures("every_form")


def test_logits_that_are_a_little_off_are_refused(llama_source, tmp_path):
    """A checkpoint whose largest ratio is a hundredth off what the recipe asks for."""
    source = open_checkpoint(str(llama_source))
    convert(str(llama_source), tmp_path / "out", recipe(1.82), check=False)
    asked = make_plan(source, recipe(1.8))
    with pytest.raises(CtxextError, match="logits of the converted model differ") as refusal:
        compare_logits(tmp_path / "out", source, asked.recipe, asked.model, asked.stock)
    (relative,) = re.findall(r"by (\S+)\.$", refusal.value.message)
    assert float(relative) < 0.05, "not so far off that anything would notice"


def recipe(ratio_max: float) -> Recipe:
    return Recipe([MsPoE(ratio_max=ratio_max, first_layer=0, head_order="fixed")])


@pytest.mark.thorough
def test_a_model_that_does_not_load_is_reported_as_such(llama_source, tmp_path):
    source = open_checkpoint(str(llama_source))
    convert(str(llama_source), tmp_path / "out", recipe(1.8), check=False)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    config["ctxext_code"]["steps"][0]["method"] = "planted"
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    asked = make_plan(source, recipe(1.8))
    with pytest.raises(CtxextError, match="does not load in a clean process: KeyError: 'planted'"):
        compare_logits(tmp_path / "out", source, asked.recipe, asked.model, asked.stock)


def test_a_layer_that_answers_no_number_is_seen():
    there = torch.ones(1, 2, 3)
    for answers in ([there * math.nan, there], [there, there * math.nan]):
        assert math.isnan(isolated_process.largest_difference(answers, [there, there]))
    assert isolated_process.largest_difference([there, there * 1.5], [there, there]) == 0.5


PLAIN = Rotary(theta=1e4, dim=8, span=8, trained_length=64, context_length=64, parameters={"rope_type": "default"})
MSPOE = MsPoE(ratio_max=1.8, first_layer=0, head_order="fixed")


@pytest.mark.parametrize(
    ("change", "step", "message"),
    [
        (("def rerope(settings, layer, m, n, frequencies):", "settings['gone']"), ReRope(factor=4), "KeyError: 'gone'"),
        (("def temperature(settings, layer, m):", "1 / 0"), ReRope(factor=4), "ZeroDivisionError: division by zero"),
        (("def choose(settings, layer, queries, keys, scaling):", "{}['gone']"), MSPOE, "KeyError: 'gone'"),
    ],
)
@pytest.mark.thorough
def test_a_faulty_reference_is_not_reported_as_a_faulty_model(change, step, message, llama, tmp_path, monkeypatch):
    """In the clean process, where a method's own function fails or one that methods share."""
    folder = shutil.copytree(isolated_checks.SCRIPT.parent, tmp_path / "verify")
    (file,) = (path for path in (folder / "references").glob("*.py") if change[0] in path.read_text())
    before, _, after = file.read_text().partition(change[0])
    file.write_text(f"{before}{change[0]}\n    {change[1]}{after}")
    line = before.count("\n") + 2
    monkeypatch.setattr(isolated_checks, "SCRIPT", folder / isolated_checks.SCRIPT.name)
    with pytest.raises(CtxextError) as error:
        convert(str(llama), tmp_path / "out", Recipe([step]))
    assert error.value.message == f"The reference of {step.name} fails: {message} ({file.name}, line {line})"
    assert "Fix the reference; the checkpoint may be correct" in error.value.hint


def test_a_fault_of_a_reference_before_the_clean_process(llama, tmp_path, monkeypatch):
    places = vars(REFERENCES["rerope"]) | {"places": lambda settings, reach: 1 / 0}
    monkeypatch.setitem(REFERENCES, "rerope", SimpleNamespace(**places))
    with pytest.raises(CtxextError, match=r"The reference of rerope fails: ZeroDivisionError: division by zero$"):
        convert(str(llama), tmp_path / "out", Recipe([ReRope(factor=4)]))


def test_a_fault_of_a_reference_of_a_schedule(monkeypatch):
    monkeypatch.setattr(PositionInterpolation, "to_dict", lambda _: {})
    with pytest.raises(
        CtxextError, match=r"The reference of pi fails: KeyError: 'factor' \(frequencies.py, line \d+\)"
    ):
        rotation.expected_frequencies([PositionInterpolation(factor=2)], PLAIN, 64)


def test_other_faults_of_a_script_are_not_attributed_to_references():
    said = 'Traceback:\n  File "/a/script.py", line 3, in <module>\n  File "/a/yarn.py", line 7, in f\nKeyError: 1'
    failed = subprocess.CompletedProcess([], 1, "", said)
    assert isolated.fault_within(failed, ["/b/yarn.py"]) is None
    assert isolated.fault_within(failed, ["/a/yarn.py"]) == ("/a/yarn.py", "KeyError: 1 (yarn.py, line 7)")


def test_a_reference_is_called_in_each_layer():
    expected = isolated_process.Expected.__new__(isolated_process.Expected)
    expected.positions, expected.angles, expected.rows = [0, 1], {}, None
    asked = SimpleNamespace(relation=lambda settings, layer, m, n, w: ([float(layer)], [0.0]))
    for layer in (0, 1, 0):
        expected.layer = layer
        ((_, _, angles, _),) = expected.pairs({}, asked, (1.0,))
        assert angles.unique().tolist() == [float(layer)]


def test_replaced_functions_are_removed_afterwards():
    space = {"kept": 1}
    with model_process.replace_functions(space, {"kept": 2, "added": 3}):
        assert space == {"kept": 2, "added": 3}
    assert space == {"kept": 1}


@pytest.mark.thorough
def test_a_form_that_the_unconverted_model_fails_in_is_named_and_not_compared(tmp_path):
    """MiniMax's masks leave out the tokens of earlier calls, and raise errors for padded ones."""
    source = open_checkpoint(str(tiny_models.save("minimax", tmp_path / "source")))
    plan = make_plan(source, Recipe([method_named("dca")(factor=4.0)]))
    convert(str(tmp_path / "source"), tmp_path / "out", plan.recipe, check=False)
    verification = compare_logits(tmp_path / "out", source, plan.recipe, plan.model, plan.stock)
    assert {"one call (sdpa)", "decoded (sdpa)", "decoded (eager)"} <= set(verification.forms)
    assert {"continued (sdpa)", "continued (sdpa, padded)"} <= set(verification.unusable)
    assert "wrong without the method too: " in verification.coverage


@pytest.mark.parametrize(
    ("result", "unchanged", "says_nothing"),
    [
        (1.0, 1.0, True),
        (1.0, 0.01, False),
        (1.0, 1e-6, False),
        (1e-6, 1.0, False),
        (math.nan, 1.0, False),
        (1.0, "it raises", True),
        ("it raises", "it raises", True),
        ("it raises", 1.0, False),
    ],
)
def test_what_is_as_wrong_without_the_method(result, unchanged, says_nothing):
    assert decoding_process.is_as_wrong(result, unchanged) == says_nothing


def test_calls_of_a_form_have_drafts_and_swapped_texts():
    events = []
    calls = [("one call", 4), ("continued", 2), ("decoded", 2)]
    way = Way("form", "sdpa", calls, batch=2, drafts={"continued": (3,), "decoded": (1, 1)}, swaps=True)
    cache = SimpleNamespace(
        crop=lambda count: events.append(("crop", count)),
        reorder_cache=lambda order: events.append(("swap", order.tolist())),
    )
    run = lambda first, end, order, is_draft: events.append((first, end, [*order], is_draft))  # noqa: E731
    names = [name for name, *_ in run_calls(way, {"cache": cache}, run)]
    assert names == ["one call", "continued", "decoded", "decoded"]
    swapped = [1, 0]
    assert events == [
        *((0, 4, [0, 1], False), ("swap", swapped)),
        *((4, 7, swapped, True), ("crop", -3), (4, 6, swapped, False)),
        *((6, 7, swapped, True), (7, 8, swapped, True), ("crop", -2), (6, 7, swapped, False)),
        *((7, 8, swapped, True), ("crop", -1), (7, 8, swapped, False)),
    ]
