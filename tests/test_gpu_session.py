"""The session on an accelerator (`make bench-gpu`), tried on the CPU: its parts, their time limits, and its wheels."""

import importlib.util
import json
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import psutil
import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "gpu_session.py"


@pytest.fixture
def session():
    spec = importlib.util.spec_from_file_location("gpu_session", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def lines_of(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_part_that_hangs_or_fails_is_reported_and_the_others_run(session, tmp_path, monkeypatch, capsys):
    scripts = {
        "hangs": "import time; time.sleep(60)",
        "fails": "raise SystemExit('out of luck')",
        "works": "print('{\"figure\": 1}')",
    }
    for name, text in scripts.items():
        (tmp_path / f"{name}.py").write_text(text)
    parts = {name: session.Part(str(tmp_path / f"{name}.py"), "", "", 1) for name in scripts}
    monkeypatch.setattr(session, "PARTS", parts | {"hangs": parts["hangs"]._replace(share=0.01)})
    session.run([*scripts], time.monotonic() + 20, tmp_path, dict(os.environ), "cpu", "tiny")
    lines = lines_of(tmp_path / "session.jsonl")
    assert [line["part"] for line in lines] == [*scripts]
    assert [line["state"] for line in lines] == ["stopped at its limit of 0 s", "failed with exit code 1", "done"]
    assert [line["lines"] for line in lines] == [0, 0, 1]
    assert lines_of(tmp_path / "works.jsonl") == [{"figure": 1}]
    assert "out of luck" in capsys.readouterr().out


def test_a_stopped_part_keeps_its_figures_and_leaves_no_process(session, tmp_path):
    figures = tmp_path / "figures.jsonl"
    command = ["sh", "-c", "sleep 60 & echo $!; wait"]
    line = session.run_part(command, 0.2, figures, tmp_path / "session.log", dict(os.environ))
    assert line["state"] == "stopped at its limit of 0 s"
    assert line["lines"] == 1
    child, deadline = int(figures.read_text()), time.monotonic() + 10
    while psutil.pid_exists(child) and psutil.Process(child).status() != "zombie":
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.thorough
def test_missing_packages_come_from_wheels(session, tmp_path, monkeypatch):
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "carried-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("carried.py", "VERSION = '1.0'\n")
        wheel.writestr("carried-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: carried\nVersion: 1.0\n")
        wheel.writestr("carried-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("carried-1.0.dist-info/RECORD", "")
    monkeypatch.setattr(session, "IMPORTS", "import carried, json; print(json.dumps({'carried': carried.VERSION}))")
    with pytest.raises(SystemExit, match="gpu-wheels"):
        session.prepare(tmp_path / "none", tmp_path / "folder", "cpu")
    environment, versions = session.prepare(wheels, tmp_path / "folder", "cpu")
    assert versions == {"carried": "1.0"}
    assert environment["PYTHONPATH"].startswith(str(tmp_path / "folder"))
    assert importlib.util.find_spec("carried") is None


@pytest.mark.thorough
def test_all_parts_run_at_tiny_shapes(tmp_path):
    words = [sys.executable, str(SCRIPT), "--device", "cpu", "--shape", "tiny", "--wheels", str(tmp_path / "none")]
    result = subprocess.run([*words, "--out", str(tmp_path)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    about, *parts = lines_of(tmp_path / "session.jsonl")
    assert {"ctxext", "torch", "transformers", "device"} <= about.keys()
    assert {line["part"]: line["state"] for line in parts} == dict.fromkeys(
        ("logits", "methods", "windows", "training"), "done"
    )
    figures = {line["part"]: lines_of(tmp_path / f"{line['part']}.jsonl") for line in parts}
    logits = [line for line in figures["logits"] if "skipped" not in line]
    assert len({line["method"] for line in logits}) == 10
    for line in logits:
        limit = 0 if line["against"] == "the unmodified model" else 1e-5 if line["dtype"] == "float32" else 0.2
        assert line["difference"] <= limit, line
    costs = [line for part in ("methods", "windows") for line in figures[part] if "skipped" not in line]
    assert all(line["prefill_s"] > 0 and line["step_ms"] > 0 for line in costs)
    assert all(line["pieces_difference"] < 1e-5 for line in figures["windows"] if "skipped" not in line)
    assert all(line["tokens_per_s"] > 0 for line in figures["training"])
