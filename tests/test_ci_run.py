"""`.ci/run` with stand-ins for what it runs: steps beside others are shown whole, and any that fails ends the run."""

import os
import shutil
import subprocess
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[1]
MAKE = """#!/bin/sh
echo "make $1"
case $1 in
  story) echo $$ > "$STORY_PROCESS"; sleep ${STORY_SECONDS:-0}; echo "the story ends"; exit ${STORY:-0} ;;
  lint) exit ${LINT:-0} ;;
  test) exit ${QUICK:-0} ;;
  database) exit ${DATABASE:-0} ;;
  newer) exit ${NEWER:-0} ;;
esac
"""
# It ends once the step beside it has begun.
PYTHON = '#!/bin/sh\nwhile ! [ -s "$STORY_PROCESS" ]; do sleep 0.01; done\necho tests\nexit ${TESTS:-0}\n'


@pytest.fixture
def ci(tmp_path):
    """Run it in a folder of its own; gives its exit code and the lines that it says."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci" / "run")
    programs = {"bin/make": MAKE, ".venv/bin/python": PYTHON}
    for path, text in programs.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
        (tmp_path / path).chmod(0o755)

    def run(**environment):
        environment |= {
            "STORY_PROCESS": str(tmp_path / "story"),
            "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
            "TMPDIR": str(tmp_path),
        }
        done = subprocess.run(
            [tmp_path / ".ci" / "run"], env={**os.environ, **environment}, capture_output=True, text=True, check=False
        )
        assert list(tmp_path.glob("tmp.*")) == []
        return done.returncode, done.stdout.splitlines()

    return run


def test_every_step_runs_and_is_shown(ci):
    code, lines = ci()
    assert code == 0
    assert [line for line in lines if line.startswith("make")] == [
        "make .venv/installed",
        "make releases",
        "make lint",
        "make docs-site",
        "make test",
        "make database",
        "make newer",
        "make story",
        "make golden",
    ]
    assert lines.count("tests") == 1
    assert "the story ends" in lines
    assert lines[-1].startswith("== all:")


@pytest.mark.parametrize(
    ("fails", "last"),
    [
        ({"LINT": "3"}, "make lint"),
        ({"QUICK": "4"}, "make test"),
        ({"TESTS": "5"}, "tests"),
        ({"DATABASE": "8"}, "make database"),
        ({"NEWER": "7"}, "make newer"),
        ({"STORY": "6"}, "the story ends"),
    ],
)
def test_a_step_that_fails_ends_the_run_with_its_code(ci, fails, last):
    code, lines = ci(**fails)
    assert code == int(*fails.values())
    assert [line for line in lines if not line.startswith("==")][-1] == last


def test_a_failure_ends_the_steps_beside(ci, tmp_path):
    code, lines = ci(TESTS="5", STORY_SECONDS="60")
    assert code == 5
    assert "the story ends" not in lines
    process, until = int((tmp_path / "story").read_text()), time.monotonic() + 20
    while psutil.pid_exists(process) and psutil.Process(process).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < until, "it still runs"
        time.sleep(0.05)
