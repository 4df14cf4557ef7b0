"""The sample that `make test` takes of the longest tests names tests that exist, and leaves some of their cases."""

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from sampled import SAMPLED, is_in_part

TESTS = Path(__file__).parent


@pytest.mark.thorough
def test_every_sample_belongs_to_a_test_and_selects_its_cases():
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-m", "not slow", *SAMPLED]
    result = subprocess.run(command, capture_output=True, text=True, cwd=TESTS, check=False)
    cases: dict[str, list[str]] = {}
    for line in result.stdout.splitlines():
        name, _, case = line.removeprefix("tests/").partition("[")
        cases.setdefault(name, []).append(case.removesuffix("]"))
    sampled = {f"{file}::{test}": kept for file, tests in SAMPLED.items() for test, kept in tests.items()}
    for name, kept in sampled.items():
        assert name in cases, f"{name} is no test"
        assert any(re.search(kept, case) for case in cases[name]), f"no case of {name} is kept"


def item(number, *markers):
    return SimpleNamespace(nodeid=f"tests/test_one.py::test[{number}]", get_closest_marker=lambda name: name in markers)


@pytest.mark.parametrize("marker", ["thorough", "slow"])
def test_each_left_out_test_is_in_one_part(marker):
    parts = [sum(is_in_part(item(number, marker), f"{which}/6") for number in range(600)) for which in range(6)]
    assert sum(parts) == 600
    assert all(60 < size < 140 for size in parts)
    assert all(sum(is_in_part(item(number, marker), f"{which}/6") for which in range(6)) == 1 for number in range(60))


def test_quick_tests_are_in_every_part():
    assert all(is_in_part(item(number), f"{which}/6") for number in range(60) for which in range(6))
