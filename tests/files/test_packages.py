"""The tested releases of transformers: one range, and a notice if the installed release is outside it."""

import importlib.util
import json
import re
import subprocess
from pathlib import Path

import pytest

from ctxext.files import packages

ROOT = Path(__file__).parents[2]


@pytest.fixture
def newer(monkeypatch):
    """As if a later release were installed."""
    monkeypatch.setattr(packages, "installed_version", lambda package: "99.1.0")


@pytest.mark.parametrize(
    ("file", "pattern", "release"),
    [
        ("constraints.txt", r"^transformers==(.+)$", packages.NEWEST),
        ("pyproject.toml", r'^  "transformers>=(.+)",$', packages.OLDEST),
        ("README.md", r"transformers ([\d.]+) to [\d.]+\d", packages.OLDEST),
        ("README.md", r"transformers [\d.]+ to ([\d.]+\d)", packages.NEWEST),
        ("constraints.txt", r"^torch==(.+)$", packages.TESTED_TORCH[0]),
        ("docs/versions.md", r"all quick tests pass with torch ([\d.]+\d) and ", packages.TESTED_TORCH[0]),
        ("docs/versions.md", r"all quick tests pass with torch [\d.]+ and ([\d.]+\d)", packages.TESTED_TORCH[1]),
    ],
)
def test_the_files_name_the_range(file, pattern, release):
    assert re.search(pattern, (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE)[1] == release


@pytest.mark.parametrize(
    ("version", "word"),
    [
        *[(version, "") for version in ("5.24.0", "5.9.0", "5.16.1", "")],
        *[(version, "newer") for version in ("5.24.1", "5.100.0")],
        *[(version, "older") for version in ("5.8.1", "4.57.6")],
    ],
)
def test_versions_are_compared_as_versions(version, word, monkeypatch):
    monkeypatch.setattr(packages, "installed_version", lambda package: version)
    monkeypatch.setattr(packages, "OLDEST", "5.9.0")
    monkeypatch.setattr(packages, "NEWEST", "5.24.0")
    notice = packages.untested_notice()
    assert word in notice if word else notice == ""


def test_env_reports_a_newer_version(run, newer):
    result = run("env", "--json")
    assert json.loads(result.stdout)["tested transformers"] == f"{packages.OLDEST} to {packages.NEWEST}"
    assert json.loads(result.stdout)["tested torch"] == "2.13.0 and 2.15.0"
    assert "transformers 99.1.0 is newer than" in " ".join(result.stderr.split())


def test_env_reports_nothing_of_a_tested_version(run, monkeypatch):
    monkeypatch.setattr(packages, "installed_version", lambda package: packages.OLDEST)
    assert "newer" not in run("env").output


def test_convert_reports_it_once_for_methods_with_code(run, newer, tmp_path):
    words = ("convert", "demo", tmp_path / "out", "--factor", "4", "--dry-run", "--quiet", "--method")
    assert " ".join(run(*words, "self-extend").stderr.split()).count("transformers 99.1.0 is newer than") == 1
    assert "99.1.0" not in run(*words, "yarn").output


@pytest.mark.thorough
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
