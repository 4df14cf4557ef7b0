"""A run of an evaluation: its records, how it is resumed, and the time that is left."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from importlib import import_module

import pytest
from safetensors.torch import load_file, save_file

from ctxext.api import Recipe, Settings, convert, evaluate
from ctxext.errors import CtxextError
from ctxext.evaluate.results_log import ResultsLog
from ctxext.evaluate.run import plan_run
from ctxext.methods import Yarn
from ctxext.models.model import Loading
from ctxext.tasks.base import keys_of

SETTINGS = {
    "tasks": ("needle", "passkey", "kv", "perplexity", "short"),
    "lengths": (320, 512),
    "depths": (0.0, 0.5, 1.0),
    "samples": 4,
    "kv_ids": "number",
    "batch_size": 2,
}


def without_times(report):
    if isinstance(report, dict):
        return {key: without_times(value) for key, value in report.items() if key != "seconds"}
    return [without_times(value) for value in report] if isinstance(report, list) else report


SCRIPT = """
import sys, time
from pathlib import Path
from ctxext.api import Settings, evaluate
from ctxext.evaluate.results_log import ResultsLog
real = ResultsLog.append
def slow(self, record):
    real(self, record)
    time.sleep(0.15)
ResultsLog.append = slow
evaluate([sys.argv[1]], Settings(**eval(sys.argv[3])), out=Path(sys.argv[2]))
"""


@pytest.mark.thorough
def test_killed_and_resumed_is_as_uninterrupted(checkpoint, pictures, tmp_path):
    whole = evaluate([str(checkpoint)], Settings(**SETTINGS), out=tmp_path / "whole")
    words = [sys.executable, "-c", SCRIPT, checkpoint, tmp_path / "killed", repr(SETTINGS)]
    process = subprocess.Popen(words, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    lines = tmp_path / "killed" / "cells.jsonl"
    deadline = time.monotonic() + 60
    while not (lines.exists() and lines.read_bytes().count(b"\n") >= 9):
        assert process.poll() is None, "it ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "killed" / "report.json").exists()
    with lines.open("ab") as file:
        file.write(b'{"model": "tiny", "task": "needle", "leng')
    before = lines.read_bytes().count(b"\n")
    done = evaluate([str(checkpoint)], Settings(**SETTINGS), out=tmp_path / "killed", resume=True)
    assert without_times(done) == without_times(whole)
    written = without_times(json.loads((tmp_path / "killed" / "report.json").read_text()))
    assert written == without_times(json.loads((tmp_path / "whole" / "report.json").read_text()))
    assert before < lines.read_bytes().count(b"\n"), "nothing was left to do"
    assert len(whole["models"][0]["cells"]) == 18
    records = [json.loads(line) for line in lines.read_text().splitlines()]
    keys = [key for record in records if "task" in record for key in keys_of(record)]
    assert len(keys) == len(set(keys)), "something was measured twice"
    for name in ("report.html", "needle-tiny.png", "perplexity.png"):
        assert (tmp_path / "whole" / name).stat().st_size > 1000


@pytest.mark.parametrize(("longest_first", "expected"), [(False, [320, 512] * 2), (True, [512, 320] * 2)])
def test_the_order_of_lengths_within_a_time_limit(longest_first, expected, checkpoint, tmp_path):
    settings = Settings(tasks=("passkey",), lengths=(320, 512), depths=(0.5,), samples=2)
    run = plan_run([str(checkpoint)], settings, out=tmp_path / "out", minutes=5)
    run.longest_first = longest_first
    run.report()
    records = map(json.loads, (tmp_path / "out" / "cells.jsonl").read_text().splitlines())
    assert [record["length"] for record in records if "correct" in record] == expected


@pytest.mark.parametrize("models", [[], ()])
def test_no_model_is_refused(models):
    with pytest.raises(CtxextError, match="The list of models is empty"):
        evaluate(models)


def test_a_finished_run_is_not_run_again(checkpoint, tmp_path, monkeypatch):
    small = Settings(tasks=("passkey",), lengths=(300,), samples=2)
    first = evaluate([str(checkpoint)], small, out=tmp_path / "out")
    monkeypatch.setattr(import_module("ctxext.models.model"), "load_model", None)
    assert evaluate([str(checkpoint)], small, out=tmp_path / "out", resume=True) == first
    with pytest.raises(CtxextError, match="already contains results"):
        evaluate([str(checkpoint)], small, out=tmp_path / "out")


@pytest.mark.parametrize(
    "change", [{"correct": ["<b>"]}, {"correct": None}, {"task": "../other"}, {"seconds": "x"}, {"samples": ["x"]}]
)
def test_lines_of_another_form_end_a_resumed_run_in_one_line_or_are_left_out(change, checkpoint, tmp_path):
    settings, out = Settings(tasks=("passkey",), lengths=(300,), samples=1, depths=(0.5,)), tmp_path / "out"
    whole = evaluate([str(checkpoint)], settings, out=out)
    *first, last = (out / "cells.jsonl").read_text().splitlines()
    (out / "cells.jsonl").write_text("\n".join([*first, json.dumps({**json.loads(last), **change})]) + "\n")
    if "task" not in change:
        report = evaluate([str(checkpoint)], settings, out=out, resume=True)
        assert without_times(report) == without_times(whole) | {"skipped_lines": 1}
    else:
        with pytest.raises(CtxextError, match="is not a report of ctxext eval"):
            evaluate([str(checkpoint)], settings, out=out, resume=True)
    assert {path.name for path in tmp_path.iterdir()} <= {"out", ".out.lock"}


LAUNCHED = """
import sys
from pathlib import Path
from ctxext.api import Settings, evaluate
from ctxext.models.model import Loading
evaluate([sys.argv[1]], Settings(**eval(sys.argv[3])), loading=Loading(device="cpu"), out=Path(sys.argv[2]))
"""


@pytest.mark.slow
def test_two_processes_share_the_work(checkpoint, tmp_path):
    whole = evaluate([str(checkpoint)], Settings(**SETTINGS), loading=Loading(device="cpu"))
    (tmp_path / "part.py").write_text(LAUNCHED)
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    words += [tmp_path / "part.py", checkpoint, tmp_path / "out", repr(SETTINGS)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    shared = json.loads((tmp_path / "out" / "report.json").read_text())
    counts = [len((tmp_path / "out" / name).read_text().splitlines()) for name in ("cells.jsonl", "cells-1.jsonl")]
    assert min(counts) > 10, "one process did everything"
    assert without_times(shared) == without_times(json.loads(json.dumps(whole)))


@pytest.mark.thorough
def test_torn_and_foreign_lines_are_left_out(run, checkpoint, tmp_path):
    words = ["--task", "passkey", "--lengths", "300", "--samples", "2", "--depths", "2", "--out", tmp_path / "out"]
    assert run("eval", checkpoint, *words).exit_code == 0
    whole = json.loads((tmp_path / "out" / "report.json").read_text())
    lines = (tmp_path / "out" / "cells.jsonl").read_text().splitlines()
    # Another program wrote between the lines, and one of them is torn.
    torn = [lines[0], "[1, 2]", lines[1], '{"a": 1}', lines[2], lines[3][:40]]
    (tmp_path / "out" / "cells.jsonl").write_text("".join(line + "\n" for line in torn))
    result = run("eval", checkpoint, *words, "--resume")
    assert result.exit_code == 0
    assert "3 lines of" in " ".join(result.stderr.split())
    again = json.loads((tmp_path / "out" / "report.json").read_text())
    assert without_times(again) == without_times(whole) | {"skipped_lines": 3}


@pytest.mark.thorough
def test_two_runs_do_not_share_a_folder(run, checkpoint, tmp_path):
    from ctxext.files.output_directory import lock_output

    words = ["--task", "passkey", "--lengths", "300", "--samples", "1", "--depths", "1"]
    words += ["--out", tmp_path / "new" / "o"]
    (tmp_path / "new").mkdir()
    hold = "import sys\nfrom pathlib import Path\nfrom ctxext.files.output_directory import lock_output\n"
    hold += "with lock_output(Path(sys.argv[1])):\n    print('held', flush=True)\n    sys.stdin.read()\n"
    with subprocess.Popen(
        [sys.executable, "-c", hold, tmp_path / "new" / "o"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as other:
        assert other.stdout.readline() == b"held\n"
        result = run("eval", checkpoint, *words)
        assert result.exit_code == 1
        assert "Another process is writing" in str(result.exception)
        assert not (tmp_path / "new" / "o").exists()
        other.stdin.close()
        other.wait()
    assert run("eval", checkpoint, *words).exit_code == 0
    with lock_output(tmp_path / "new" / "o"):
        pass


def test_every_record_is_on_the_disk_before_the_next_one_is_measured(tmp_path, monkeypatch):
    """What a power cut leaves is what was measured: the whole line is in the file when it is synced."""
    synced, real = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda number: synced.append(os.fstat(number).st_size) or real(number))
    log, sizes = ResultsLog(tmp_path / "out"), []
    log.begin({"models": []}, resume=False, overwrite=False)
    sizes.append((tmp_path / "out" / "cells.jsonl").stat().st_size)
    for number in range(3):
        log.append({"model": "m", "number": number})
        sizes.append((tmp_path / "out" / "cells.jsonl").stat().st_size)
    assert synced == sizes
    assert len(set(sizes)) == 4


@pytest.mark.parametrize("is_named", [False, True], ids=["beside", "named"])
@pytest.mark.parametrize("is_old", [False, True], ids=["recorded", "0.3.0"])
def test_the_source_is_known_by_its_content_and_not_by_its_name(is_named, is_old, checkpoint, tmp_path):
    """Issue: any folder of the source's name was the source, so a cost of +0.004 was reported as -5.77."""
    settings = Settings(tasks=("short",), lengths=(300,), samples=2)
    source, other = tmp_path / "one" / "model", tmp_path / "two" / "model"
    shutil.copytree(checkpoint, source)
    convert(source, tmp_path / "one" / "longer", Recipe([Yarn(factor=2)]))
    shutil.copytree(source, other)
    tensors = load_file(other / "model.safetensors")
    save_file({name: tensor * 1.5 for name, tensor in tensors.items()}, other / "model.safetensors", {"format": "pt"})
    shutil.copytree(tmp_path / "one" / "longer", tmp_path / "two" / "longer")
    if is_old:
        for place in ("one", "two"):
            record = tmp_path / place / "longer" / "ctxext.json"
            content = json.loads(record.read_text())
            content["source"].pop("fingerprint", None)
            record.write_text(json.dumps(content))

    def against(place):
        folders = [tmp_path / place / "longer", *([tmp_path / place / "model"] if is_named else [])]
        model = next(m for m in evaluate(list(map(str, folders)), settings)["models"] if m["name"] == "longer")
        return model["short"].get("against")

    assert against("one")["model"] == "model"
    assert not against("two")
