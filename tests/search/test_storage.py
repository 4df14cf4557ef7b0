"""Studies in optuna storages shared by several machines."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import optuna
import pytest
from optuna.exceptions import StorageInternalError

from ctxext import redaction
from ctxext.checkpoint.opening import open_checkpoint
from ctxext.errors import CtxextError
from ctxext.redaction import redact
from ctxext.search.options import StudyPlace, redact_storage
from ctxext.search.space import build_space
from ctxext.search.study import Study

WORDS = ("--target-length", 640, "--samples", 1, "--checked", 2, "--lengths", 640, "--keep-short", 5, "--seed", 3)
WORDS = (*WORDS, "--methods", "ntk,yarn,longrope")


def test_a_journal_is_gone_on_from_and_replaced(run, source, tmp_path):
    place = ["--storage", tmp_path / "study.log", "--study", "mine"]
    first = run("search", source, tmp_path / "best.yaml", *WORDS, "--trials", 3, *place, "--json")
    assert json.loads(first.stdout)["trials"] == 3
    again = run("search", source, tmp_path / "best.yaml", *WORDS, "--trials", 5, *place)
    assert 'The study "mine in ' in again.exception.message
    more = run("search", source, tmp_path / "best.yaml", *WORDS, "--trials", 5, *place, "--resume", "--json")
    assert json.loads(more.stdout)["trials"] == 5
    other = run("search", source, tmp_path / "best.yaml", *WORDS, "--trials", 3, *place, "--overwrite", "--json")
    assert json.loads(other.stdout)["front"] == json.loads(first.stdout)["front"]
    assert not (tmp_path / "best.db").exists()


def test_a_password_is_not_shown():
    assert redact_storage("postgresql://me:secret@host/db") == "postgresql://me:…@host/db"
    assert redact_storage("/shared/study.log") == "/shared/study.log"
    assert redact_storage("postgresql://host/db?password=secret&x=1") == "postgresql://host/db?password=…&x=1"
    assert redact_storage("postgresql://me:secret@host:PORT/db") == "postgresql://..."
    assert "secret" not in str(StudyPlace(name="x", storage="postgresql://me:secret@host/db"))


def test_a_password_that_was_shown_is_taken_out_of_what_the_driver_says(monkeypatch):
    monkeypatch.setattr(redaction, "_secrets", set())
    redact_storage("postgresql://me:correct-horse@host/db")
    assert redact('FATAL: no user "me" with correct-horse') == 'FATAL: no user "me" with …'


NO_URLS = (
    *("postgresql://u:hunter2", "postgresql://u:hunter2/db", "postgresql://u:p@host:hunter2/db"),
    *("postgresql:/u:hunter2@host/db", "postgresql:u:hunter2@host/db", "mysql+pymysql:/u:hunter2@host/db"),
    "postgresql://me:hunter2hunter2@host:PORT/db",
)
"""A password without a host, or instead of the port, was shown."""

NO_PATHS = (
    '{"url": "postgresql://host/db", "password": "hunter2"}',
    ' {"pw": "hunter2"}',
    '["hunter2"]',
    '"hunter2"',
    "host=h user=me password=hunter2",
    "u:hunter2@host/db",
    "api_key=hunter2",
)
"""JSON, or settings of another form: they were taken for the name of a file, and shown."""


@pytest.mark.parametrize(
    ("storage", "message"),
    [
        ("nosuchdb://host/name", "cannot be used"),
        ("mysql+cymysql://host/name", "needs a database driver"),
        ("postgresql+psycopg2://u:a/hunter2@[host/db", "driver|is not a database URL"),
        ("absent/study.log", "for the study does not exist"),
        *((storage, "--storage") for storage in NO_URLS),
        *((storage, "neither a database URL nor the path") for storage in NO_PATHS),
    ],
)
def test_a_place_that_cannot_be_used_is_one_clear_line_without_a_secret(
    run, source, tmp_path, monkeypatch, storage, message
):
    monkeypatch.chdir(tmp_path)
    result = run("search", source, "best.yaml", *WORDS, "--storage", storage)
    assert isinstance(result.exception, CtxextError), result.exception
    assert re.search(message, result.exception.message)
    assert "\n" not in result.exception.message
    assert "hunter2" not in result.output + result.exception.message + result.exception.hint
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_three_processes_share_a_study_and_one_is_killed(source, tmp_path):
    """In the database of CTXEXT_TEST_STORAGE if it is set, otherwise in a journal file."""
    storage = os.environ.get("CTXEXT_TEST_STORAGE") or str(tmp_path / "study.log")
    name = f"three-{os.getpid()}"
    place = StudyPlace(name, storage=storage)

    def begin(out: str, *more: str) -> subprocess.Popen:
        words = map(str, (*WORDS, "--trials", 40, "--storage", storage, "--study", name, *more))
        command = [sys.executable, "-m", "ctxext", "search", str(source), str(tmp_path / out), *words, "-q"]
        return subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})

    def trials() -> list:
        return optuna.load_study(study_name=name, storage=place.open()).get_trials(deepcopy=False)

    first = begin("a.yaml")
    while not place.exists or sum(trial.state.is_finished() for trial in trials()) < 1:
        assert first.poll() is None
        time.sleep(0.2)
    others = [begin("b.yaml", "--resume"), begin("c.yaml", "--resume")]
    while len({(trial.user_attrs.get("owner") or [0, 0])[1] for trial in trials()} - {0}) < 3:
        assert others[1].poll() is None
        time.sleep(0.2)
    others[0].send_signal(signal.SIGKILL)
    assert first.wait() == 0
    assert others[1].wait() == 0
    done = trials()
    place.clear()
    assert all(trial.state == optuna.trial.TrialState.COMPLETE for trial in done), "what the dead one tried is tried"
    assert 40 <= len(done) <= 42
    assert [trial.number for trial in done] == list(range(len(done)))


def test_a_damaged_study_is_told_in_one_line(tmp_path):
    with (
        pytest.raises(CtxextError, match=r"cannot be used: .*invalid data"),
        StudyPlace(path=tmp_path / "x.db").explain_errors(),
    ):
        raise StorageInternalError("invalid data in the commit")


def test_a_recipe_that_is_being_tried_counts_among_the_trials(tmp_path):
    study = Study(StudyPlace(path=tmp_path / "study.db"), build_space(open_checkpoint("demo"), 1024, ["ntk"]), 0, 0.01)
    study.begin({"source": "demo"})
    assert study.is_due(0), "what is queued is tried whatever the limit"
    study.ask()
    assert not study.is_due(1)
    assert study.is_due(2)


def test_a_study_that_several_write_is_waited_for(tmp_path, monkeypatch):
    """SQLite's default timeout is 5 seconds, and a slow disk holds the lock longer."""
    import optuna

    opened = []
    monkeypatch.setattr(optuna.storages, "RDBStorage", lambda url, **named: opened.append((url, named)))
    StudyPlace(path=tmp_path / "best.db").open()
    assert opened == [(f"sqlite:///{tmp_path / 'best.db'}", {"engine_kwargs": {"connect_args": {"timeout": 60}}})]


@pytest.mark.parametrize(
    "line",
    [
        {"op_code": 99, "worker_id": "x"},
        {"op_code": -1, "worker_id": "x"},
        {"op_code": 0, "worker_id": "x"},
        {"op_code": None},
        [],
        7,
    ],
)
def test_a_line_of_a_journal_that_optuna_does_not_know_is_told_in_one_line(line, tmp_path):
    journal = tmp_path / "study.log"
    journal.write_text(json.dumps(line) + "\n")
    with pytest.raises(CtxextError, match="cannot be used"):
        StudyPlace(name="mine", storage=str(journal)).check(resume=True, overwrite=False)


def test_a_pipe_is_no_place_for_a_study(tmp_path):
    """Reading a pipe would wait for a writer."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    for place in (StudyPlace(storage=str(tmp_path / "pipe")), StudyPlace(path=tmp_path / "link")):
        with pytest.raises(CtxextError, match="is not a regular file"):
            place.check(resume=True, overwrite=False)
