"""`.ci/run` with stand-ins for what it runs: steps beside others are shown whole, and any that fails ends the run."""

import os
import shutil
import subprocess
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[1]
# The thorough tests end once the step beside them has begun.
MAKE = """#!/bin/sh
echo "make $*"
case $1 in
  story) echo $$ > "$STORY_PROCESS"; sleep ${STORY_SECONDS:-0}; echo "the story ends"; exit ${STORY:-0} ;;
  lint) exit ${LINT:-0} ;;
  readers) exit ${READERS:-0} ;;
  test) exit ${QUICK:-0} ;;
  thorough) while ! [ -s "$STORY_PROCESS" ]; do sleep 0.01; done; exit ${TESTS:-0} ;;
  database) exit ${DATABASE:-0} ;;
  browser) exit ${BROWSER:-0} ;;
  newer) exit ${NEWER:-0} ;;
esac
"""


@pytest.fixture
def ci(tmp_path):
    """Run it in a folder of its own; gives its exit code and the lines that it says."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci" / "run")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "make").write_text(MAKE)
    (tmp_path / "bin" / "make").chmod(0o755)

    def run(*words, **environment):
        environment |= {
            "STORY_PROCESS": str(tmp_path / "story"),
            "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
            "TMPDIR": str(tmp_path),
        }
        done = subprocess.run(
            [tmp_path / ".ci" / "run", *words],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            check=False,
        )
        assert list(tmp_path.glob("tmp.*")) == []
        return done.returncode, done.stdout.splitlines()

    return run


def test_every_step_runs_and_is_shown(ci):
    code, lines = ci()
    assert code == 0
    assert [line for line in lines if line.startswith("make")] == [
        "make .venv/installed",
        "make readers",
        "make lint",
        "make docs-site",
        "make test",
        "make thorough PART=0/6",
        "make database",
        "make browser",
        "make newer",
        "make golden ONLY=help,errors,configurations",
        "make story PART=0/6",
    ]
    assert "the story ends" in lines
    assert lines[-1].startswith("== all:")


def test_all_parts(ci):
    code, lines = ci("all")
    assert code == 0
    assert {"make thorough PART=0/1", "make story PART=0/1", "make parallel", "make real"} <= set(lines)


def test_the_commit_chooses_the_part(ci, tmp_path):
    (tmp_path / "bin" / "git").write_text("#!/bin/sh\necho 00000b\n")
    (tmp_path / "bin" / "git").chmod(0o755)
    assert "make thorough PART=5/6" in ci()[1]


@pytest.mark.parametrize(
    ("fails", "last"),
    [
        ({"LINT": "3"}, "make lint"),
        ({"READERS": "9"}, "make readers"),
        ({"QUICK": "4"}, "make test"),
        ({"TESTS": "5"}, "make thorough PART=0/6"),
        ({"DATABASE": "8"}, "make database"),
        ({"BROWSER": "2"}, "make browser"),
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
