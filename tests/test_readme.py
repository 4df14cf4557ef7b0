"""The README's commands and Python, typed by a new user in an empty folder, in the order in which they stand there."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from hub_server import hub

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(console|python)\n(.*?)```", README, flags=re.S)
TOKEN = "hf_goodgoodgood"
# Training and searching for minutes is measured elsewhere; here everything must run.
SHORTER = {"--steps": "2", "--samples": "2", "--minutes": "2", "--trials": "4"}


def commands(block: str) -> list[list[str]]:
    joined = block.replace("\\\n", " ")
    lines = (line[2:] for line in joined.splitlines() if line.startswith("$ ctxext "))
    return [shlex.split(line, comments=True) for line in lines]


def shortened(words: list[str]) -> list[str]:
    shorter = {**SHORTER, "--minutes": "1"} if "--gradient" in words else SHORTER
    return [shorter.get(before, word) for before, word in zip(["", *words], words, strict=False)]


def test_the_readme_has_the_whole_story():
    """Convert to mspoe, measure, train, measure, verify, push."""
    wanted = ["convert", "eval", "finetune", "eval", "verify", "push"]
    for kind, block in BLOCKS:
        for words in commands(block) if kind == "console" else []:
            if wanted and words[1] == wanted[0] and (words[1] != "convert" or "mspoe" in words):
                wanted.pop(0)
    assert wanted == []


@pytest.mark.slow
def test_every_command_runs(tmp_path):
    """With CTXEXT_BIN it is the program of another environment, and its Python; so `make story` tries a fresh one."""
    place = Path(os.environ["CTXEXT_BIN"]) if "CTXEXT_BIN" in os.environ else None
    program = [str(place / "ctxext")] if place else [sys.executable, "-m", "ctxext"]
    python = str(place / "python") if place else sys.executable
    with hub({}, tmp_path / "hub") as server:
        server.tokens = {TOKEN: "me"}
        environment = {**os.environ, "HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path / "cache"), "HF_TOKEN": TOKEN}
        environment |= {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "NO_COLOR": "1"}
        folder = tmp_path / "empty"
        folder.mkdir()
        for kind, block in BLOCKS:
            runs = [[python, "-c", block]] if kind == "python" else []
            runs += [[*program, *shortened(words[1:])] for words in (commands(block) if kind == "console" else [])]
            for command in runs:
                result = subprocess.run(
                    command, capture_output=True, text=True, cwd=folder, env=environment, check=False, timeout=900
                )
                assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
                assert TOKEN not in result.stdout + result.stderr
        assert len(server.repositories) == 1
