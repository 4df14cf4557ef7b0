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

from ctxext.api import Recipe, Settings, convert, evaluate
from ctxext.cli import processes
from ctxext.cli.processes import Launch
from ctxext.errors import CtxextError
from ctxext.methods import Yarn
from ctxext.models.model import Loading
from evaluation_fixtures import checkpoint, no_pictures, tokenizer  # noqa: F401

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
NUM_RECORDS = 2 * (3 * 2 * 3 * 2 + 4 + 4)
"""Records of two models: retrieval tasks × lengths × depths × batches, and documents."""


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
def models(checkpoint, tmp_path_factory):  # noqa: F811
    extended = tmp_path_factory.mktemp("extended") / "yarn"
    convert(checkpoint, extended, Recipe([Yarn(factor=2)]), check=False)
    return [str(checkpoint), str(extended)]


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


@pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.thorough)])
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
    evaluate(models, settings, loading=Loading(device="cpu"), out=out)
    return read(out)


@pytest.mark.thorough
@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_process_ends_the_run_which_another_number_resumes(models, many, killed, tmp_path):
    out = tmp_path / "out"
    launcher, children = begin("eval", *models, *MANY, "--num-processes", "2", "--out", out)
    children[killed].kill()
    stdout, stderr = launcher.communicate(timeout=60)
    assert ended(children)
    assert (launcher.returncode, stdout) == (1, "")
    error, hint = stderr.splitlines()
    assert error == f"error: Process {killed + 1} of 2 was killed by SIGKILL, so the others were stopped."
    assert re.fullmatch(r"hint:  Finished results are kept. Resume with: ctxext eval .* --resume", hint)
    before = sum(map(len, records_of(out)))
    assert not (out / "report.json").exists()
    result = run_real("eval", *models, *MANY, "--num-processes", "3", "--out", out, "--resume")
    assert result.returncode == 0, result.stderr
    assert before < sum(map(len, records_of(out))) == 2 * (2 * 3 * 15 + 30)
    assert read(out) == many


@pytest.mark.thorough
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_launcher_stops_all(models, number, code, tmp_path):
    launcher, children = begin("eval", *models, *[word for word in MANY if word != "-q"], "--num-processes", "2",
                               "--out", tmp_path / "out")  # fmt: skip
    launcher.send_signal(number)
    _, stderr = launcher.communicate(timeout=60)
    assert ended(children)
    assert launcher.returncode == code
    assert stderr.count("Resume with") == (number == signal.SIGINT)
    assert "error:" not in stderr


@pytest.mark.thorough
def test_an_error_of_all_processes_is_reported_once(tmp_path):
    result = run_real("eval", tmp_path / "none", "--num-processes", "2", "--out", tmp_path / "out", "--json")
    assert result.returncode == 1
    assert result.stderr.count("error:") == 1
    assert "none" in json.loads(result.stdout)["error"]["message"]


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ('print(\'{"error": {"message": "Broken.", "hint": "Repair it."}}\'); sys.exit(1)', "Broken."),
        ("sys.exit(1)", "Process 2 of 2 ended with exit code 1, so the others were stopped."),
        ("os.kill(os.getpid(), 9)", "Process 2 of 2 was killed by SIGKILL, so the others were stopped."),
    ],
)
def test_an_error_of_another_process_is_reported(code, message, monkeypatch, tmp_path):
    monkeypatch.setattr(processes, "_GRACE", 0.1)
    first = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    with (tmp_path / "1").open("wb") as file:
        second = subprocess.Popen([sys.executable, "-c", f"import os, sys; {code}"], stdout=file)
    with pytest.raises(CtxextError) as raised:
        processes._wait([first, second], tmp_path / "out", tmp_path)
    processes._end([first, second])
    assert raised.value.message == message
    assert first.returncode == -signal.SIGTERM


@pytest.mark.parametrize("value", ["0", "-1", "257", "10000000000000"])
def test_bad_numbers_are_refused_in_one_line(run, value):
    result = run("eval", "demo", "--num-processes", value)
    assert result.exception.message == f"--num-processes must be a number from 1 to 256, not {value}."


def test_another_launcher_decides_the_number(monkeypatch, tmp_path):
    monkeypatch.setenv("WORLD_SIZE", "2")
    Launch(1).start(tmp_path, None)
    Launch(2).start(tmp_path, None)
    with pytest.raises(CtxextError, match="--num-processes 3 differs from the 2 processes of the launcher"):
        Launch(3).start(tmp_path, None)


@pytest.mark.parametrize(
    ("words", "flag"), [(("--engine", "vllm"), "--engine"), (("--server", "http://a/v1"), "--server")]
)
def test_an_engine_is_refused(run, words, flag):
    result = run("eval", "demo", "--task", "needle", *words, "--num-processes", "2")
    assert result.exception.message == f"--num-processes cannot be combined with {flag}."


@pytest.mark.thorough
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
def test_torchrun(models, whole, tmp_path):
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "ctxext", "eval", *models]
    words = [sys.executable, *words, *WORDS, "--out", tmp_path / "out"]
    result = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    assert min(map(len, records_of(tmp_path / "out"))) > 5, "a process did too little"
    assert read(tmp_path / "out") == whole
