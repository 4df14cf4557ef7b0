"""A fault of a reference is told as that, with its place, whichever process runs it; layers reach references."""

import subprocess
from types import SimpleNamespace

import pytest

from ctxext.converters import convert
from ctxext.errors import CtxextError
from ctxext.recipes import PositionInterpolation, Recipe
from ctxext.recipes.encodings.rotary import Rotary
from ctxext.recipes.methods.rerope import ReRope
from ctxext.system import isolated
from ctxext.verify import clean_process, logits, reference

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
def test_in_the_check_after_converting(kind, llama, tmp_path, monkeypatch):
    text, told = BROKEN[kind]
    (tmp_path / "broken.py").write_text(text)
    for module in (reference, logits):
        monkeypatch.setattr(module, "reference_file", lambda method: tmp_path / "broken.py")
    with pytest.raises(CtxextError) as error:
        convert(str(llama), tmp_path / "out", Recipe([ReRope(factor=4)]))
    assert error.value.message.startswith("The reference of rerope fails: ")
    assert told in error.value.message
    assert "mend the reference" in error.value.hint


@pytest.mark.parametrize("answer", ["numbers['gone'], 1.0", "[1.0]"])
def test_in_a_schedule(answer, tmp_path, monkeypatch):
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
