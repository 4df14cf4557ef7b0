"""The list of planted faults matches the code: each line exists, and so do the tests that must detect it."""

import importlib
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def planted():
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        return importlib.import_module("planted").PLANTED
    finally:
        sys.path.remove(str(ROOT / "tools"))


def test_every_planted_fault_changes_one_place(planted):
    """If this fails, update the line in `tools/planted.py`, and plant the fault once."""
    sources = {file: (ROOT / "src" / "ctxext" / file).read_text(encoding="utf-8") for file, *_ in planted}
    assert [(file, before) for file, before, *_ in planted if sources[file].count(before) != 1] == []
    assert [(file, before) for file, before, after, _ in planted if before == after] == []


def test_the_tests_that_must_see_them_are_there(planted):
    missing = []
    for test in {test for *_, tests in planted for test in tests}:
        file, _, name = test.partition("::")
        path = ROOT / file
        if not path.is_file() or (name and not re.search(rf"^def {name}\(", path.read_text(encoding="utf-8"), re.M)):
            missing.append(test)
    assert missing == []
