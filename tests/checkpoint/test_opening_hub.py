"""Checkpoints on the Hub, with a local server.

Each command runs in a separate process, because the client reads its settings on import: a fork reads them again."""

import hashlib
import json
import os
import subprocess
import sys

import pytest

from hub_server import COMMIT, hub
from small_llama import read_json


@pytest.fixture
def ctxext(request, llama_source, tmp_path):
    """Run ctxext with a Hub that has one repository, `maker/tiny`, and return the finished process."""
    is_new = getattr(request, "param", "") == "new"
    processes = subprocess if is_new else request.getfixturevalue("our_processes")
    with hub({"maker/tiny": llama_source}) as server:

        def call(*words: str) -> subprocess.CompletedProcess:
            environment = {**os.environ, **server.settings(tmp_path / "cache")}
            command = [sys.executable, "-m", "ctxext", *words]
            return processes.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, check=False)

        call.server = server
        yield call


@pytest.mark.parametrize("ctxext", ["forked", "new"], indirect=True)
def test_convert_from_the_hub(ctxext, llama_source, tmp_path):
    result = ctxext("convert", "maker/tiny", "out", "--method", "yarn", "--factor", "4", "--json")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["revision"] == COMMIT
    manifest = read_json(tmp_path / "out" / "ctxext.json")
    digest = hashlib.sha256((llama_source / "model.safetensors").read_bytes()).hexdigest()
    assert manifest["source"] == {"name": "maker/tiny", "revision": COMMIT}
    assert manifest["weights"] == {"model.safetensors": digest}  # It is the name of the file in the cache.
    assert "base_model: maker/tiny" in (tmp_path / "out" / "README.md").read_text()
    assert not (tmp_path / "out" / "model.safetensors").is_symlink()
    assert str(tmp_path) not in (tmp_path / "out" / "config.json").read_text()


@pytest.mark.parametrize(
    "words", [["inspect", "maker/tiny"], ["convert", "maker/tiny", "-m", "ntk", "--factor", "2", "--dry-run"]]
)
@pytest.mark.thorough
def test_looking_downloads_no_weights(ctxext, words):
    result = ctxext(*words)
    assert result.returncode == 0, result.stderr
    assert not [line for line in ctxext.server.requests if line.startswith("GET") and "safetensors" in line]


@pytest.mark.thorough
def test_revisions_and_repositories_that_do_not_exist(ctxext, tmp_path):
    wrong_revision = ctxext("convert", "maker/tiny", "out", "-m", "pi", "--factor", "2", "--revision", "nope")
    assert (wrong_revision.returncode, "no revision" in wrong_revision.stderr) == (1, True), wrong_revision.stderr
    unknown = ctxext("inspect", "maker/other")
    assert (unknown.returncode, "no such repository" in unknown.stderr) == (1, True), unknown.stderr
    assert unknown.stderr.count("\n") <= 2
    assert not (tmp_path / "out").exists()
