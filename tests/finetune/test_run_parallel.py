"""Sequence parallelism in several processes gives the result of one, through faults too. Needs DeepSpeed."""

import dataclasses
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tiny_base import PARALLEL, QUICK, Tokens, documents, tune, write_jsonl

TESTS = Path(__file__).parents[1]
pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed"),
]


@dataclasses.dataclass(frozen=True)
class Marked(Tokens):
    """Documents with marked answers of several lengths."""

    def reader(self, options):
        from ctxext.finetune.documents import Document

        def read(*_):
            for number, ids in enumerate(self.words):
                size = 20 + 3 * number % 40
                yield Document(ids[:size], is_learned=[place > 3 + 5 * number % 17 for place in range(size)])

        return read


FORMS = {
    "run-on": (dataclasses.replace(PARALLEL, piece=7, checkpointing=True), Tokens(documents())),
    "answers": (dataclasses.replace(QUICK, batch_size=4, length=63, short_share=0.4), Marked(documents())),
    "restart": (
        dataclasses.replace(PARALLEL, pack="restart", checkpointing=True),
        Tokens([ids[: 17 + 5 * number % 60] for number, ids in enumerate(documents(60))]),
    ),
    "pose": (dataclasses.replace(QUICK, length=128, window=32, positions="pose", batch_size=4), Tokens(documents())),
}
"""Options and data; the length of `answers` is odd, and it has steps with two short rows."""

ALL = """
import sys
sys.path[:0] = [{tests!r}, {here!r}]
import dataclasses
from pathlib import Path
from test_run_parallel import FORMS
from tiny_base import tune
for name, (options, data) in FORMS.items():
    tune(Path({base!r}), Path({out!r}) / name, dataclasses.replace(options, sequence_parallel={count}), data=data)
"""


def launch(count, script, *words):
    """Run a script in some processes, as torchrun does."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(count)]
    command += ["--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0", str(script), *map(str, words)]
    settings = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    return subprocess.run(command, env=settings, capture_output=True, text=True, check=False)


def weights(out):
    return load_file(out / "adapter" / "adapter_model.safetensors")


@pytest.fixture(scope="module")
def alone(base, tmp_path_factory):
    """The runs of one process."""
    out = tmp_path_factory.mktemp("alone")
    return out, {name: tune(base, out / name, options, data=data).losses for name, (options, data) in FORMS.items()}


@pytest.mark.parametrize("count", [2, 4])
def test_several_processes_equal_one(base, alone, tmp_path, count):
    """With four, each of the two key heads is on two processes."""
    script = tmp_path / "all.py"
    script.write_text(
        ALL.format(tests=str(TESTS), here=str(Path(__file__).parent), base=str(base), out=str(tmp_path), count=count)
    )
    done = launch(count, script)
    assert done.returncode == 0, done.stderr[-20000:]
    for name, losses in alone[1].items():
        shared = json.loads((tmp_path / name / "finetune.json").read_text())["losses"]
        assert [step for step, _ in shared] == [step for step, _ in losses]
        assert max(abs(one - two) for (_, one), (_, two) in zip(shared, losses, strict=True)) <= 1e-5, name
        one, two = weights(alone[0] / name), weights(tmp_path / name)
        assert max(float((one[key] - two[key]).abs().max()) for key in one) <= 1e-4, name
        assert max(float(tensor.abs().max()) for tensor in one.values()) > 0.01


FAULTY = """
import errno, os, signal, sys
import torch
from ctxext.cli.app import main
from ctxext.finetune.trainer import OrderedTrainer
fault, rank, step, save = sys.argv[1], os.environ["RANK"], OrderedTrainer.training_step, OrderedTrainer._save_checkpoint
count = 0

def training_step(self, *arguments, **named):
    global count
    count += 1
    if count == 14 and (fault == "term" or (fault == "kill" and rank == "1")):
        os.kill(os.getpid(), signal.SIGTERM if fault == "term" else signal.SIGKILL)
    return step(self, *arguments, **named)

def refuse(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")

def save_checkpoint(self, *arguments, **named):
    if fault == "full" and rank == "0" and self.state.global_step >= 4:
        torch.save = refuse
    return save(self, *arguments, **named)

OrderedTrainer.training_step, OrderedTrainer._save_checkpoint = training_step, save_checkpoint
sys.argv[1:2] = []
main()
"""


@pytest.mark.parametrize(("fault", "count"), [("term", 2), ("term", 1), ("kill", 2), ("full", 4)])
def test_a_fault_loses_no_save(base, tmp_path, fault, count):
    """SIGTERM on all processes, SIGKILL on one, a full disk on the first: the rest equals a run without the fault.

    The run is resumed in as many processes, in one, or in more.
    """
    data, script = write_jsonl(tmp_path / "data.jsonl"), tmp_path / "faulty.py"
    script.write_text(FAULTY)
    words = ["--data", data, "--length", 64, "--steps", 6, "--batch-size", 4, "--rank", 4, "--learning-rate", 5e-3]
    words += ["--save-every", 2, "--pack", "run-on", "--sequence-parallel", 2]
    stopped = launch(2, script, fault, "finetune", base, tmp_path / "out", *words)
    assert stopped.returncode != 0
    assert not (tmp_path / "out").exists()
    messages = {
        "term": "Resume under the same launcher with",
        "kill": "SIGKILL",
        "full": "No space left",
    }
    assert messages[fault] in stopped.stderr
    assert "This is a bug" not in stopped.stderr
    if fault != "kill":
        assert stopped.stderr.count(messages[fault]) == 1, stopped.stderr[-5000:]
    words[-1] = count
    resumed = launch(count, script, "none", "finetune", base, tmp_path / "out", *words, "--resume")
    assert resumed.returncode == 0, resumed.stderr[-20000:]
    assert "resuming after step" in resumed.stderr
    plain = [str(word) for word in words[:-2]]
    done = subprocess.run(
        [sys.executable, "-m", "ctxext", "finetune", str(base), str(tmp_path / "plain"), *plain],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    one, two = weights(tmp_path / "plain"), weights(tmp_path / "out")
    assert max(float((one[key] - two[key]).abs().max()) for key in one) <= 1e-4


def test_a_dry_run_in_several_processes(base, tmp_path, monkeypatch):
    """They read what the first one writes: the sequences, and the conversion of a source."""
    data, script = write_jsonl(tmp_path / "data.jsonl"), tmp_path / "faulty.py"
    script.write_text(FAULTY)
    words = ["--data", data, "--length", 64, "--steps", 6, "--batch-size", 4, "--sequence-parallel", 2, "--dry-run"]
    source, out, temporary = base.with_name("source"), tmp_path / "out", tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    for model, more in ((base, []), (source, ["--method", "yarn"])):
        done = launch(2, script, "none", "finetune", model, out, *words, *more)
        assert done.returncode == 0, done.stderr[-20000:]
        assert done.stdout.count("memory") == 1, done.stdout
    assert not list(temporary.glob("ctxext-dry-run-*"))
