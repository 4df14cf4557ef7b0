"""Malformed answers of a server: one clear line each, in bounded time and memory, or an answer that can be used."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import malformed

HERE = Path(malformed.__file__)


def ask_all(kinds):
    """Return what a client in a process of its own makes of all kinds, and the growth of its memory in MB."""
    with malformed.running(kinds) as url:
        command = [sys.executable, str(HERE), url, str(len(kinds))]
        result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=500)
    *lines, growth = result.stdout.splitlines()
    assert result.stderr == ""
    return [json.loads(line) for line in lines], int(growth)


@pytest.mark.parametrize("sample", [100, pytest.param(None, marks=pytest.mark.thorough)])
@pytest.mark.thorough
def test_every_kind(sample):
    kinds = malformed.all_kinds(sample)
    assert len(kinds) > 200
    answers, growth = ask_all(kinds)
    assert len(answers) == len(kinds)
    for number, text, seconds in answers:
        name = kinds[number].name
        assert text.startswith(("error ", "completion")), (name, text)
        assert "WRONG" not in text, (name, text)
        assert malformed.KEY not in text, name
        assert malformed.KEY[:8] not in text, name
        assert text.isprintable(), (name, text)
        assert len(text) < 700, name
        assert seconds < malformed.TIMEOUT + 5, (name, seconds)
    assert growth < 300
