"""`ctxext eval` of a model with sliding windows, killed twice and resumed, against an uninterrupted run."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from hand_made import make_tokenizer
from tiny_models import SIZES, build

# A process is killed while it waits after a line, so that the line is complete.
SLOW = """
import time
from ctxext.evaluate.results_log import ResultsLog
real = ResultsLog.append
ResultsLog.append = lambda self, record: (real(self, record), time.sleep(0.3))
"""
COMMAND = "import sys; from ctxext.cli.app import main; sys.exit(main())"
OPTIONS = ["--task", "needle,kv,documents,niah-multikey-1,perplexity,short", "--lengths", "640,1300", "--depths", "3"]
OPTIONS += ["--samples", "3", "--kv-ids", "number", "--stride", "500", "--allow-beyond", "--dtype", "fp32"]


def without_times(content):
    if isinstance(content, dict):
        return {key: without_times(value) for key, value in content.items() if key != "seconds"}
    return [without_times(value) for value in content] if isinstance(content, list) else content


def results_of(folder):
    """The report and the measured cells, with every digit of their losses."""
    lines = [json.loads(line) for line in (folder / "cells.jsonl").read_text().splitlines()]
    cells = [json.dumps(without_times(line), sort_keys=True) for line in lines if "task" in line]
    assert len(cells) == len(set(cells)), "something was measured twice"
    return without_times(json.loads((folder / "report.json").read_text())), sorted(cells)


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["gemma3_text", "falcon_h1"])
def test_killed_twice_and_resumed_is_as_uninterrupted(family, monkeypatch, tmp_path):
    for key in ("vocab_size", "max_position_embeddings"):
        monkeypatch.setitem(SIZES, key, 640)
    model, environment = build(family), {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    model.generation_config.eos_token_id = [*range(1, 640, 8)]
    model.save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")

    def start(out, *words, script=COMMAND):
        words = [sys.executable, "-c", script, "eval", tmp_path / "model", *OPTIONS, "--out", tmp_path / out, *words]
        return subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def finish(process):
        said, _ = process.communicate(timeout=300)
        assert process.returncode == 0, said[-2000:]

    finish(start("whole"))
    lines = tmp_path / "killed" / "cells.jsonl"
    for resumes, count in (((), 6), (("--resume",), 14)):
        process = start("killed", *resumes, script=SLOW + COMMAND)
        deadline = time.monotonic() + 300
        while not (lines.exists() and lines.read_bytes().count(b"\n") >= count):
            assert process.poll() is None, f"it ended before it was killed: {process.communicate()[0][-2000:]}"
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert not (tmp_path / "killed" / "report.json").exists()
    finish(start("killed", "--resume"))
    whole, resumed = results_of(tmp_path / "whole"), results_of(tmp_path / "killed")
    assert len(whole[1]) == 30
    assert resumed == whole
