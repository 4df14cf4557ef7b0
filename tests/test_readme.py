"""The README's and the first guide's commands and Python, typed by a new user in an empty folder, in their order."""

import os
import subprocess

import pytest

from hub_server import hub
from pages import SMALL, STORIES, blocks, programs

TOKEN = "hf_goodgoodgood"


def test_the_first_guide_has_the_whole_story():
    """Convert to mspoe, measure, train, measure, verify, push."""
    wanted = ["convert", "eval", "finetune", "eval", "verify", "push"]
    for words in (words for block in blocks(STORIES[1]) for words in block.commands()):
        if wanted and words[:2] == ["ctxext", wanted[0]] and (words[1] != "convert" or "mspoe" in words):
            wanted.pop(0)
    assert wanted == []


def test_the_readme_is_short():
    assert len(STORIES[0].read_text(encoding="utf-8").splitlines()) <= 120


@pytest.mark.slow
@pytest.mark.parametrize("page", STORIES, ids=lambda page: page.stem)
def test_every_command_runs(page, tmp_path):
    program, python = programs()
    with hub({}, tmp_path / "hub") as server:
        server.tokens = {TOKEN: "me"}
        environment = {**os.environ, **server.settings(tmp_path / "cache"), "HF_TOKEN": TOKEN, "NO_COLOR": "1"}
        folder, pushed = tmp_path / "empty", 0
        folder.mkdir()
        for block in blocks(page):
            runs = [[python, "-c", block.text]] if block.kind == "python" else []
            for words in block.commands():
                if words[0] == "ctxext":
                    runs.append([*program, *words[1:], *SMALL.get(words[1], [])])
                    pushed += words[1] == "push"
            for command in runs:
                result = subprocess.run(
                    command, capture_output=True, text=True, cwd=folder, env=environment, check=False, timeout=900
                )
                assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
                assert TOKEN not in result.stdout + result.stderr
        assert len(server.repositories) == pushed
