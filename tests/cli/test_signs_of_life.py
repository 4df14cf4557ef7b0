"""Commands in a terminal of 80 columns: something changes every few seconds, and Ctrl-C leaves no bar behind."""

import os
import re
import shutil
from importlib import resources

import pytest

from terminal import watch

MOST = 3.0 * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
"""Seconds without a visible change: three on a quiet machine."""

TEXT = "The lighthouse keeper wrote down every ship that passed in the night. " * 400


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("terminal")
    shutil.copytree(str(resources.files("ctxext") / "demo" / "checkpoint"), folder / "model")
    (folder / "data.txt").write_text(TEXT)
    assert watch(["convert", "model", "made", "--method", "yarn", "--factor", "4"], folder).code == 0
    return folder


@pytest.mark.thorough
@pytest.mark.parametrize(
    "words",
    [
        "inspect model",
        "env",
        "convert model yarn --method yarn --factor 4",
        "convert model code --method self-extend --factor 4",
        "convert model mspoe --method mspoe --no-verify",
        "verify made --against model",
        "push made me/made --dry-run",
        "eval model --task needle,short --samples 4",
        "compare model --target-length 1k --methods yarn,self-extend --samples 4 --depths 3",
        "search model best.yaml --target-length 1k --trials 2 --samples 2 --checked 4 --methods yarn",
        "finetune made tuned --data data.txt --steps 6 --length 512 --batch-size 1",
        "finetune made dry --data data.txt --steps 6 --length 512 --batch-size 1 --dry-run",
    ],
)
def test_something_changes_every_few_seconds(words, place):
    shown = watch(words.split(), place)
    assert shown.code == 0, shown.lines[-5:]
    assert shown.silence <= MOST, shown.before
    assert shown.work <= 3, shown.before


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("words", "stage", "ending"),
    [
        ("convert model stop1 --method mspoe", "calibrating", "OUT was not written."),
        ("finetune made stop2 --data data.txt --steps 500 --length 512 --batch-size 1", "step 3", "--resume"),
        ("eval model --task needle --samples 500 --out stop3", "needle", "--resume"),
        ("search model stop4.yaml --target-length 1k --trials 99 --methods yarn", "trying", "--resume"),
    ],
)
def test_ctrl_c_clears_the_bar_and_says_what_happened(words, stage, ending, place):
    shown = watch(words.split(), place, interrupt_at=stage)
    assert shown.code == 130
    assert "Stopped" in " ".join(shown.left[-3:])
    assert ending in " ".join(shown.left[-3:])
    assert not any(re.search(r"\d:\d\d$", line) for line in shown.left), "a bar, which ends with the elapsed time"
    assert shown.raw.count("\x1b[?25l") == shown.raw.count("\x1b[?25h"), "the cursor is visible again"
