"""`--num-processes`: several processes give the results of one, and end together."""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch
import typer
from transformers import Gemma3ForCausalLM

from ctxext.api import Recipe, Settings, convert, evaluate
from ctxext.cli import processes
from ctxext.cli.output import Output
from ctxext.cli.processes import Launch, resumable
from ctxext.errors import CtxextError
from ctxext.methods import Yarn
from ctxext.models.model import Loading
from evaluation_fixtures import checkpoint, no_pictures, tokenizer  # noqa: F401
from tiny_models import tiny_config

WORDS = ["--task", "needle,passkey,kv,perplexity,short", "--lengths", "320,512", "--depths", "3", "--samples", "4"]
WORDS += ["--kv-ids", "number", "--batch-size", "2", "--device", "cpu", "--allow-beyond", "-q"]
SETTINGS = Settings(
    tasks=("needle", "passkey", "kv", "perplexity", "short"),
    lengths=(320, 512),
    depths=(0.0, 0.5, 1.0),
    samples=4,
    kv_ids="number",
    batch_size=2,
    allow_beyond=True,
)
NUM_RECORDS = 3 * (3 * 2 * 3 * 2 + 4 + 4)
"""Records of three models: retrieval tasks × lengths × depths × batches, and documents."""


def without_times(report):
    if isinstance(report, dict):
        return {key: without_times(value) for key, value in report.items() if key not in ("seconds", "times")}
    return [without_times(value) for value in report] if isinstance(report, list) else report


def read(out):
    return without_times(json.loads((out / "report.json").read_text()))


def records_of(out):
    """Return the records of each process."""
    lines = [path.read_text().splitlines() for path in sorted(out.glob("cells*.jsonl"))]
    return [[line for line in of_process if '"task"' in line and '"header"' not in line] for of_process in lines]


@pytest.fixture(scope="module")
def models(checkpoint, tokenizer, tmp_path_factory):  # noqa: F811
    """A model, its extension, and one with sliding windows."""
    extended, windows = (tmp_path_factory.mktemp("models") / name for name in ("yarn", "windows"))
    convert(checkpoint, extended, Recipe([Yarn(factor=2)]), check=False)
    config = tiny_config("gemma3_text")
    config.vocab_size, config.max_position_embeddings = len(tokenizer), 1024
    torch.manual_seed(0)
    Gemma3ForCausalLM(config).save_pretrained(windows)
    tokenizer.save_pretrained(windows)
    return [str(checkpoint), str(extended), str(windows)]


@pytest.fixture(scope="module")
def whole(models, tmp_path_factory):
    """The report of one process."""
    out = tmp_path_factory.mktemp("whole") / "out"
    evaluate(models, SETTINGS, loading=Loading(device="cpu"), out=out)
    return read(out)


def command(*words):
    return [sys.executable, "-m", "ctxext", *map(str, words)]


def environment(**others):
    clean = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return {**clean, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path), **others}


def run_real(*words, **others):
    return subprocess.run(
        command(*words), env=environment(**others), capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.thorough
@pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_results_equal_those_of_one_process(models, whole, count, tmp_path):
    result = run_real("eval", *models, *WORDS, "--num-processes", count, "--out", tmp_path / "out")
    assert (result.returncode, result.stderr) == (0, "")
    records = records_of(tmp_path / "out")
    assert len(records) == count
    assert min(map(len, records)) > 5, "a process did too little"
    assert sum(map(len, records)) == NUM_RECORDS
    assert read(tmp_path / "out") == whole


def begin(*words):
    """Start a run, and return its processes when the others have written some records."""
    launcher = subprocess.Popen(
        command(*words), env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    out, deadline = words[-1], time.monotonic() + 200
    while not (out / "cells-1.jsonl").exists() or (out / "cells-1.jsonl").read_bytes().count(b"\n") < 4:
        assert launcher.poll() is None, launcher.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return launcher, sorted(psutil.Process(launcher.pid).children(), key=lambda child: child.create_time())


def ended(children):
    _, alive = psutil.wait_procs(children, timeout=20)
    return not alive


MANY = ["--task", "passkey,short", *WORDS[2:7], "30", *WORDS[10:]]
"""Enough samples to be stopped among them."""


@pytest.fixture(scope="module")
def many(models, tmp_path_factory):
    """The report of one process."""
    out = tmp_path_factory.mktemp("many") / "out"
    settings = dataclasses.replace(SETTINGS, tasks=("passkey", "short"), samples=30, kv_ids="uuid")
    evaluate(models[:2], settings, loading=Loading(device="cpu"), out=out)
    return read(out)


@pytest.mark.thorough
@pytest.mark.parametrize("killed", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_killed_process_ends_the_run_which_another_number_resumes(models, many, killed, tmp_path):
    out = tmp_path / "out"
    launcher, children = begin("eval", *models[:2], *MANY, "--num-processes", "2", "--out", out)
    children[killed].kill()
    stdout, stderr = launcher.communicate(timeout=60)
    assert ended(children)
    assert (launcher.returncode, stdout) == (1, "")
    error, hint = stderr.splitlines()
    assert error == f"error: Process {killed + 1} of 2 was killed by SIGKILL, so the others were stopped."
    assert re.fullmatch(r"hint:  Finished results are kept. Resume with: ctxext eval .* --resume", hint)
    before = sum(map(len, records_of(out)))
    assert not (out / "report.json").exists()
    result = run_real("eval", *models[:2], *MANY, "--num-processes", "3", "--out", out, "--resume")
    assert result.returncode == 0, result.stderr
    assert before < sum(map(len, records_of(out))) == 2 * (2 * 3 * 15 + 30)
    assert read(out) == many


@pytest.mark.thorough
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_launcher_stops_all(models, number, code, tmp_path):
    launcher, children = begin("eval", *models[:2], *[word for word in MANY if word != "-q"], "--num-processes", "2",
                               "--out", tmp_path / "out")  # fmt: skip
    launcher.send_signal(number)
    _, stderr = launcher.communicate(timeout=60)
    assert ended(children)
    assert launcher.returncode == code
    assert stderr.count("Resume with") == (number == signal.SIGINT)
    assert "error:" not in stderr


@pytest.mark.thorough
def test_processes_end_after_their_launcher_was_killed(models, tmp_path):
    launcher, children = begin("eval", *models[:2], *MANY, "--num-processes", "2", "--out", tmp_path / "out")
    launcher.kill()
    _, stderr = launcher.communicate(timeout=60)
    assert ended(children)
    assert stderr.startswith("error: Lost the connection to the other processes: ")
    assert len(stderr.splitlines()) in (2, 4)


@pytest.mark.thorough
def test_an_error_of_all_processes_is_reported_once(tmp_path):
    result = run_real("eval", tmp_path / "none", "--num-processes", "2", "--out", tmp_path / "out", "--json")
    assert result.returncode == 1
    assert result.stderr.count("error:") == 1
    assert "none" in json.loads(result.stdout)["error"]["message"]


def test_another_process_that_fails_prints_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr(processes, "is_first_error", lambda: False)
    with pytest.raises(typer.Exit) as ended, resumable(tmp_path, Output()):
        raise MemoryError
    assert ended.value.exit_code == 1
    monkeypatch.setattr(processes, "is_first_error", lambda: True)
    with pytest.raises(MemoryError), resumable(tmp_path, Output()):
        raise MemoryError


@pytest.mark.parametrize("value", ["0", "257", "10000000000000"])
def test_wrong_numbers_are_refused(run, value):
    message = run("eval", "demo", "--num-processes", value).exception.message
    assert message.startswith("--num-processes must be ")
    assert "at least 1" in message or "from 1 to 256" in message


def test_another_launcher_decides_the_number(monkeypatch, tmp_path):
    monkeypatch.setenv("WORLD_SIZE", "2")
    Launch(1).start(tmp_path)
    Launch(2).start(tmp_path)
    with pytest.raises(CtxextError, match="--num-processes 3 differs from the 2 processes of the launcher"):
        Launch(3).start(tmp_path)


@pytest.mark.parametrize(
    ("words", "flag"), [(("--engine", "vllm"), "--engine"), (("--server", "http://a/v1"), "--server")]
)
def test_an_engine_is_refused(run, words, flag):
    result = run("eval", "demo", "--task", "needle", *words, "--num-processes", "2")
    assert result.exception.message == f"--num-processes cannot be combined with {flag}."


@pytest.mark.slow
@pytest.mark.parametrize("words", [["--methods", "yarn,mspoe"], ["--methods", "yarn,pi", "--minutes", "5"]])
def test_compare_equals_one_process(models, words, tmp_path):
    words = ["compare", models[0], *words, "--target-length", "1k", "--task", "needle,kv", "--kv-ids", "number"]
    words += ["--lengths", "320,600", "--samples", "6", "--device", "cpu", "-q"]
    reports = []
    for count in ("1", "2"):
        result = run_real(*words, "--num-processes", count, "--out", tmp_path / count)
        assert result.returncode == 0, result.stderr
        reports.append(read(tmp_path / count))
    assert min(map(len, records_of(tmp_path / "2"))) > 5, "a process did too little"
    for one, two in zip(*(report["models"] for report in reports), strict=True):
        assert [one["name"], one["cells"], one["recipe"]] == [two["name"], two["cells"], two["recipe"]]


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher",
    [
        ("torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        ("accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"),
    ],
    ids=["torchrun", "accelerate"],
)
def test_launchers(models, whole, launcher, tmp_path):
    words = [sys.executable, "-m", *launcher, "-m", "ctxext", "eval", *models, *WORDS, "--out", tmp_path / "out"]
    result = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    assert min(map(len, records_of(tmp_path / "out"))) > 5, "a process did too little"
    assert read(tmp_path / "out") == whole
