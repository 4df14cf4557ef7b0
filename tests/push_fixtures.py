"""Fixtures: converted checkpoints with recorded digests, and commands run against a Hub on loopback."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from ctxext.api import Recipe, convert
from ctxext.methods import MsPoE, Yarn
from hub_server import hub

TOKEN, STRANGER = "hf_goodgoodgood", "hf_otherother"


@pytest.fixture(scope="session")
def originals(llama_source, tmp_path_factory) -> dict[str, Path]:
    """A checkpoint by configuration alone and one with code; no test may change them."""
    folder = tmp_path_factory.mktemp("converted")
    recipes = {"yarn": Recipe([Yarn(factor=4)]), "mspoe": Recipe([MsPoE(first_layer=0, head_order="fixed")])}
    for name, recipe in recipes.items():
        convert(str(llama_source), folder / name, recipe, digest=True, link="copy", check=False)
    return {name: folder / name for name in recipes}


@pytest.fixture
def converted(originals, tmp_path):
    """Copies of those, for a test of its own: call it with "yarn" or "mspoe"."""

    def copy(name: str) -> Path:
        return Path(shutil.copytree(originals[name], tmp_path / name))

    return copy


@pytest.fixture
def extended(converted) -> Path:
    """A copy of the one by configuration alone."""
    return converted("yarn")


@pytest.fixture
def server(tmp_path):
    """A Hub on which `me` and `you` may write."""
    with hub({}, tmp_path / "hub") as running:
        running.tokens = {TOKEN: "me", STRANGER: "you"}
        yield running


@pytest.fixture
def commands(server, our_processes, tmp_path):
    """Run command lines in one process that uses that Hub; gives (exit code, stdout, stderr) for each."""

    def call(*lines: list[str], **settings: str) -> list:
        environment = {**os.environ, **server.settings(tmp_path / "cache"), **settings}
        script = Path(__file__).parent / "publish" / "several.py"
        result = our_processes.run(
            [sys.executable, "-c", script.read_text()],
            input=json.dumps([[str(word) for word in line] for line in lines]),
            capture_output=True,
            text=True,
            env=environment,
            cwd=tmp_path,
            check=False,
        )
        assert result.returncode == 0, result.stderr
        return json.loads(result.stdout)

    return call
