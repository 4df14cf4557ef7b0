"""The README's and the first guide's commands and Python, typed by a new user in an empty folder, in their order."""

import contextlib
import json
import os
import shlex
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hub_server import hub
from pages import SMALL, STORIES, blocks, blocks_of, programs, section
from stand_ins import write_stand_ins

LAPTOP = "A real model on a laptop"
TOKEN = "hf_goodgoodgood"
REAL_MODEL = os.environ.get("CTXEXT_SMOLLM2", "")
"""Folder of SmolLM2 (tools/real_model.py), which `make real` creates."""


def test_the_first_guide_has_the_whole_story():
    """Convert to mspoe, measure, train, measure, verify, push."""
    wanted = ["convert", "eval", "finetune", "eval", "verify", "push"]
    for words in (words for block in blocks(STORIES[1]) for words in block.commands()):
        if wanted and words[:2] == ["ctxext", wanted[0]] and (words[1] != "convert" or "mspoe" in words):
            wanted.pop(0)
    assert wanted == []


def test_the_section_for_a_laptop_leads_to_a_served_model():
    """The test of the real model reads it, so its heading and its blocks must be there."""
    commands = [words[:2] for block in blocks_of(section(STORIES[1], LAPTOP)) for words in block.commands()]
    wanted = [["ctxext", "inspect"], ["ctxext", "compare"], ["ctxext", "convert"], ["transformers", "serve"]]
    assert [words for words in commands if words in wanted] == wanted
    assert commands[-1][0] == "curl"


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
        write_stand_ins([words for block in blocks(page) for words in block.commands()], folder)
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


@pytest.mark.slow
@pytest.mark.skipif(not REAL_MODEL, reason="CTXEXT_SMOLLM2 names no folder with SmolLM2; make real creates one")
def test_every_command_for_a_laptop_runs_on_a_real_model(tmp_path):
    """As typed, with the default options, up to an answer of the served model."""
    program, python = programs()
    (tmp_path / "smollm2").symlink_to(Path(REAL_MODEL).resolve())
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "NO_COLOR": "1"}
    environment.pop("OMP_NUM_THREADS", None)
    place, servers = Path(python).parent, []
    try:
        for words in (words for block in blocks_of(section(STORIES[1], LAPTOP)) for words in block.commands()):
            if words[0] == "transformers":
                servers.append(subprocess.Popen([place / words[0], *words[1:]], cwd=tmp_path, env=environment))
                wait_for(8000, servers[-1])
            elif words[0] in ("ctxext", "curl"):
                command = [*program, *words[1:]] if words[0] == "ctxext" else [*words, "--fail"]
                started = time.monotonic()
                result = subprocess.run(
                    command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False
                )
                shown = f"$ {shlex.join(words)}\n{result.stdout}{result.stderr}{time.monotonic() - started:.0f} s\n"
                sys.stdout.write(shown)
                assert result.returncode == 0
        assert json.loads(result.stdout)["choices"][0]["message"]["content"]
    finally:
        for server in servers:
            server.terminate()
            server.wait()


def wait_for(port, server):
    """Return when a server listens; raise if it ends or needs more than five minutes."""
    until = time.monotonic() + 300
    while server.poll() is None and time.monotonic() < until:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.5)
    raise AssertionError("the server does not listen")
