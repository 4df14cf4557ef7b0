"""inspect, methods, env, --version."""

import json
import logging
import re

import pytest

from ctxext.api import METHODS
from ctxext.version import __version__
from small_llama import make_llama


def test_inspect_prints_the_content_of_the_files(run, llama):
    result = run("inspect", llama)
    assert result.exit_code == 0
    assert "default schedule, theta 10000 · 8 dimensions" in result.stdout
    assert "4 heads, 2 KV heads of size 8" in result.stdout
    assert "files agree" in result.stdout
    assert "2 of 4 pairs never complete a rotation in 128 tokens" in " ".join(result.stdout.split())
    data = json.loads(run("inspect", llama, "--json").stdout)
    assert data["rotary"]["trained_length"] == 128
    assert data["rotary"]["pairs_that_never_complete_a_turn"] == 2  # wavelengths 6.3, 63, 628, 6283
    assert data["cache_bytes"]["8192"] == 2 * 2 * 2 * 8 * 2 * 8192
    rotary = {method.name for method in METHODS if method.encoding == "rotary"}
    assert {name for name, entry in data["methods"].items() if entry["applies"]} == rotary


def test_the_exit_code_of_verify_shows_failures(run, llama, tmp_path):
    """Scripts read nothing else."""
    run("convert", llama, tmp_path / "out", "-m", "yarn", "--factor", 4)
    result = run("verify", tmp_path / "out", "--no-load", "--json")
    assert (result.exit_code, json.loads(result.stdout)["passed"]) == (0, True)
    (tmp_path / "out" / "generation_config.json").write_text("{}")
    result = run("verify", tmp_path / "out", "--no-load", "--json")
    assert (result.exit_code, json.loads(result.stdout)["passed"]) == (1, False)


def test_inspect_of_a_converted_checkpoint(run, llama, tmp_path):
    run("convert", llama, tmp_path / "out", "-m", "yarn", "--factor", 4)
    text = run("inspect", tmp_path / "out").stdout
    assert "512 tokens, extended by ctxext" in text
    assert "yarn ×4" in text
    assert "vLLM" in text


@pytest.mark.parametrize(("model_type", "words"), [("gpt2", "learned"), ("bloom", "ALiBi")])
def test_inspect_of_models_without_rotary_embeddings(run, tmp_path, model_type, words):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, "n_positions": 64, "n_head": 2}))
    result = run("inspect", tmp_path)
    assert result.exit_code == 0, result.stderr
    assert words in result.stdout


def test_inspect_reads_no_weights(run, tmp_path):
    """A sparse file of 100 GB with a valid header: reading it would take minutes."""
    folder = make_llama(tmp_path / "large")
    header = json.dumps(
        {"w": {"dtype": "F32", "shape": [25_000_000_000], "data_offsets": [0, 100_000_000_000]}}
    ).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 100_000_000_000)
    assert "25.0 B parameters" in run("inspect", folder).stdout


def test_methods_lists_them_all(run):
    data = json.loads(run("methods", "--json").stdout)
    assert [entry["name"] for entry in data["methods"]] == [method.name for method in METHODS]
    text = run("methods", "--experimental").stdout
    assert all(method.name in text for method in METHODS)


EXPERIMENTAL = {"bifocal", "rerope", "sinks", "window", "buckets", "distance-aware"}


@pytest.mark.thorough
def test_experimental_methods_are_listed_only_on_request(run, llama, tmp_path):
    assert {method.name for method in METHODS if method.is_experimental} == EXPERIMENTAL
    shown = run("methods").stdout
    rows = {line.split()[0].rstrip(",") for line in shown.splitlines() if re.match(r"  \S", line)}
    assert not rows & EXPERIMENTAL
    assert {"yarn", "ntk-alibi", "mspoe"} <= rows
    assert "Experimental methods: bifocal, rerope, sinks" in " ".join(shown.split())
    data = json.loads(run("methods", "--json").stdout)["methods"]
    assert {entry["name"] for entry in data if entry["experimental"]} == EXPERIMENTAL
    inspected = " ".join(run("inspect", llama).stdout.split())
    assert "experimental bifocal rerope sinks window distance-aware" in inspected
    assert run("convert", llama, tmp_path / "out", "-m", "sinks", "--sinks", 1, "--factor", 2).exit_code == 0
    help_text = " ".join(run("convert", "--help-all").stdout.split())
    for words in ("experimental methods", "self-extend ", "ntk-by-parts, yarn", "llama3"):
        assert f"Options of {words}" in help_text


def test_env_and_version(run):
    data = json.loads(run("env", "--json").stdout)
    assert data["ctxext"] == __version__
    assert re.match(r"\d", data["torch"])
    assert run("--version").stdout.strip() == f"ctxext {__version__}"


def test_verbose_prints_the_log_on_stderr(run, llama, tmp_path, monkeypatch):
    log = logging.getLogger("ctxext")
    monkeypatch.setattr(log, "handlers", [])
    monkeypatch.setattr(log, "level", log.level)
    words = ("convert", llama, tmp_path / "out", "-m", "yarn", "--factor", 4, "--dry-run", "--json")
    assert "DEBUG" not in run(*words).stderr
    result = run(*words, "--verbose")
    log.setLevel(logging.NOTSET)
    assert "opened" in result.stderr
    assert "planning [{'method': 'yarn', 'factor': 4.0" in " ".join(result.stderr.split())
    assert json.loads(result.stdout)
