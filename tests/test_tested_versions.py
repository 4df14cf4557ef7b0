"""The tested versions of transformers: one constant, and a notice if the installed version is newer."""

import importlib.util
import json
import re
import subprocess
from pathlib import Path

import pytest

from ctxext.files import packages

ROOT = Path(__file__).parents[1]


@pytest.fixture
def newer(monkeypatch):
    """As if a later release were installed."""
    monkeypatch.setattr(packages, "installed_version", lambda package: "99.1.0")


def test_the_constant_names_the_versions_of_the_constraints():
    files = ("constraints.txt", "constraints-transformers-4.txt")
    texts = [(ROOT / name).read_text(encoding="utf-8") for name in files]
    assert tuple(re.search(r"^transformers==(.+)$", text, re.MULTILINE)[1] for text in texts) == packages.TESTED


@pytest.mark.parametrize(
    ("version", "newer"),
    [("5.24.0", False), ("4.57.6", False), ("5.3.0", False), ("5.24.1", True), ("5.100.0", True), ("", False)],
)
def test_versions_are_compared_as_versions(version, newer, monkeypatch):
    monkeypatch.setattr(packages, "installed_version", lambda package: version)
    monkeypatch.setattr(packages, "TESTED", ("5.24.0", "4.57.6"))
    assert bool(packages.untested_notice()) is newer


def test_env_reports_a_newer_version(run, newer):
    result = run("env", "--json")
    assert json.loads(result.stdout)["tested transformers"] == ", ".join(packages.TESTED)
    assert "transformers 99.1.0 is newer than" in " ".join(result.stderr.split())


def test_env_reports_nothing_of_a_tested_version(run, monkeypatch):
    monkeypatch.setattr(packages, "installed_version", lambda package: packages.TESTED[1])
    assert "newer" not in run("env").output


def test_convert_reports_it_once_for_methods_with_code(run, newer, tmp_path):
    words = ("convert", "demo", tmp_path / "out", "--factor", "4", "--dry-run", "--quiet", "--method")
    assert " ".join(run(*words, "self-extend").stderr.split()).count("transformers 99.1.0 is newer than") == 1
    assert "99.1.0" not in run(*words, "yarn").output


def test_verify_reports_it(run, newer, tmp_path):
    assert run("convert", "demo", tmp_path / "out", "--method", "yarn", "--factor", "4", "--quiet").exit_code == 0
    checks = json.loads(run("verify", tmp_path / "out", "--json").stdout)["checks"]
    assert [check["status"] for check in checks if check["check"] == "transformers"] == ["not checked"]


def newest_releases():
    spec = importlib.util.spec_from_file_location("newest", ROOT / "tools" / "newest.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("transformers", "code"), [("", 1), ("99.1.0", 0)])
def test_make_newer_runs_the_tests_only_if_a_release_is_newer(transformers, code, monkeypatch, capsys):
    newest = newest_releases()
    found = newest.read_tested_versions() | ({"transformers": transformers} if transformers else {})
    report = {"install": [{"metadata": {"name": name, "version": version}} for name, version in found.items()]}
    done = subprocess.CompletedProcess([], 0, json.dumps(report))
    monkeypatch.setattr(newest.subprocess, "run", lambda *_, **__: done)
    assert newest.main() == code
    assert ("transformers 99.1.0" in capsys.readouterr().out) == bool(transformers)


def test_a_failing_pip_is_a_failure(monkeypatch):
    newest = newest_releases()

    def fail(command, **_):
        raise subprocess.CalledProcessError(1, command)

    monkeypatch.setattr(newest.subprocess, "run", fail)
    assert newest.main() == 2
