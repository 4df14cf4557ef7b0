"""The sample that `make test` takes of the longest tests names tests that exist, and leaves some of their cases."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from sampled import SAMPLED

TESTS = Path(__file__).parent


@pytest.mark.thorough
def test_every_sample_is_of_a_test_and_keeps_what_it_says():
    files = sorted({name.partition("::")[0] for name in SAMPLED})
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-m", "not slow", *files]
    result = subprocess.run(command, capture_output=True, text=True, cwd=TESTS, check=False)
    cases: dict[str, list[str]] = {}
    for line in result.stdout.splitlines():
        name, _, case = line.removeprefix("tests/").partition("[")
        cases.setdefault(name, []).append(case.removesuffix("]"))
    for name, kept in SAMPLED.items():
        assert name in cases, f"{name} is no test"
        if kept:
            assert any(re.search(kept, case) for case in cases[name]), f"no case of {name} is kept"
