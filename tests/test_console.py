"""Progress of the Python API, in a notebook and in a terminal."""

import io
import sys
import time
from types import ModuleType, SimpleNamespace

import pytest

from ctxext import api, console
from ctxext.errors import CtxextError
from ctxext.methods import Yarn

CALLS = {
    "converting": lambda **more: api.convert("nowhere", None, Yarn(factor=2), **more),
    "evaluating": lambda **more: api.evaluate("nowhere", **more),
    "comparing": lambda **more: api.compare("nowhere", target_length="2k", **more),
    "training": lambda **more: api.finetune("nowhere", "out", "demo", **more),
    "merging": lambda **more: api.merge("nowhere", "adapter", "out", **more),
    "verifying": lambda **more: api.verify("nowhere", **more),
}


@pytest.fixture
def notebook(monkeypatch):
    """The lines that a notebook shows."""
    lines = []
    handle = SimpleNamespace(update=lambda data, raw: lines.append(data["text/plain"]))
    monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=lambda *_, **options: handle))
    sys.modules["IPython"].get_ipython = lambda: SimpleNamespace(kernel=object())
    monkeypatch.setattr(console, "_REFRESH", 0.01)
    return lines


@pytest.mark.parametrize("title", CALLS)
def test_functions_show_progress_in_a_notebook_unless_told_otherwise(title, notebook):
    with pytest.raises(CtxextError, match="nowhere"):
        CALLS[title](progress=lambda *state: None)
    assert notebook == []
    with pytest.raises(CtxextError, match="nowhere"):
        CALLS[title]()
    assert (notebook[0], notebook[-1]) == (f"{title}   0:00", "")


def test_elsewhere_functions_show_nothing(capsys):
    with pytest.raises(CtxextError):
        CALLS["evaluating"]()
    assert capsys.readouterr() == ("", "")


@console.shows_progress("working")
def work(*, progress=None):
    progress("loading", 0, 1)
    time.sleep(0.05)
    progress("reading", 1, 2)
    time.sleep(0.05)


def test_a_notebook_shows_the_stage_the_share_and_the_time(notebook):
    work()
    assert {"working   0:00", "working: loading   0:00", "working: reading   50 %   0:00", ""} == {*notebook}


@pytest.mark.parametrize(("columns", "has_bar"), [(80, False), (120, True)])
def test_a_terminal_shows_them_too(columns, has_bar, monkeypatch):
    stream = io.StringIO()
    stream.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    work()
    shown = stream.getvalue()
    assert "working: reading" in shown
    assert " 50 %" in shown
    assert "0:00" in shown
    assert ("━" in shown) == has_bar
