"""The README's commands and Python, typed by a new user in an empty folder, in the order in which they stand there."""

import os
import subprocess

import pytest

from hub_server import hub
from pages import ROOT, SMALL, blocks, programs

BLOCKS = blocks(ROOT / "README.md")
TOKEN = "hf_goodgoodgood"


def test_the_readme_has_the_whole_story():
    """Convert to mspoe, measure, train, measure, verify, push."""
    wanted = ["convert", "eval", "finetune", "eval", "verify", "push"]
    for words in (words for block in BLOCKS for words in block.commands()):
        if wanted and words[:2] == ["ctxext", wanted[0]] and (words[1] != "convert" or "mspoe" in words):
            wanted.pop(0)
    assert wanted == []


@pytest.mark.slow
def test_every_command_runs(tmp_path):
    program, python = programs()
    with hub({}, tmp_path / "hub") as server:
        server.tokens = {TOKEN: "me"}
        environment = {**os.environ, **server.settings(tmp_path / "cache"), "HF_TOKEN": TOKEN, "NO_COLOR": "1"}
        folder = tmp_path / "empty"
        folder.mkdir()
        for block in BLOCKS:
            runs = [[python, "-c", block.text]] if block.kind == "python" else []
            for words in block.commands():
                if words[0] == "ctxext":
                    limit = ["--minutes", "1"] if "--gradient" in words else []
                    runs.append([*program, *words[1:], *SMALL.get(words[1], []), *limit])
            for command in runs:
                result = subprocess.run(
                    command, capture_output=True, text=True, cwd=folder, env=environment, check=False, timeout=900
                )
                assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
                assert TOKEN not in result.stdout + result.stderr
        assert len(server.repositories) == 1
