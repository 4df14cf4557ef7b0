"""Studies in optuna storages shared by several machines."""

import json
import math
import os
import re
import sqlite3
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import optuna
import pytest
from optuna.exceptions import StorageInternalError
from sqlalchemy.engine import make_url

from ctxext import redaction
from ctxext.checkpoint.opening import open_checkpoint
from ctxext.errors import CtxextError
from ctxext.files.processes import machine_id
from ctxext.redaction import redact
from ctxext.search import study as study_module
from ctxext.search.options import SearchOptions, StudyPlace, redact_storage
from ctxext.search.space import build_space
from ctxext.search.storage import choose_driver
from ctxext.search.study import Study

WORDS = ("--target-length", 640, "--samples", 1, "--checked", 2, "--lengths", 640, "--keep-short", 5, "--seed", 3)
WORDS = (*WORDS, "--methods", "ntk,yarn,longrope")


@pytest.mark.thorough
def test_a_journal_is_resumed_and_replaced(run, source, tmp_path):
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


def test_passwords_are_removed_from_errors_of_the_driver(monkeypatch):
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
        ("nosuchdb://host/name", "is not a known kind of database"),
        ("redis://:hunter2@host", "is not a known kind of database"),
        ("postgres://u:hunter2@host/name", "is not a known kind of database"),
        ("postgresql+psycopg3://u:hunter2@host/name", "is not a known kind of database"),
        ("mysql+cymysql://host/name", "needs the database driver cymysql"),
        ("postgresql+psycopg2://u:a/hunter2@[host/db", "driver|translate host name|is not a database URL"),
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


def test_a_damaged_study_is_reported_in_one_line(tmp_path):
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


@pytest.mark.thorough
def test_a_study_that_several_write_is_waited_for(tmp_path):
    """SQLite's default timeout is 5 seconds, and a slow disk holds the lock longer."""
    for place in (StudyPlace(path=tmp_path / "a.db"), StudyPlace(storage=f"sqlite:///{tmp_path / 'b.db'}")):
        with place.open().engine.connect() as connection:
            assert connection.exec_driver_sql("PRAGMA busy_timeout").scalar() == 300_000


@pytest.mark.thorough
def test_sqlite_blocks_writes_between_a_read_and_its_write(tmp_path):
    """Two processes that both read that a trial is queued would both take it."""
    engine = StudyPlace(path=tmp_path / "study.db").open().engine
    with engine.begin() as connection, sqlite3.connect(tmp_path / "study.db", timeout=0) as other:
        connection.exec_driver_sql("SELECT * FROM trials")
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            other.execute("INSERT INTO studies (study_name) VALUES ('x')")


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
def test_an_unknown_line_of_a_journal_is_reported_in_one_line(line, tmp_path):
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


@pytest.mark.thorough
def test_a_study_that_began_at_the_same_time_is_joined_and_an_older_one_is_not(tmp_path):
    place, space = StudyPlace(path=tmp_path / "study.db"), build_space(open_checkpoint("demo"), 1024, ["ntk"])
    began = time.time()
    assert place.check(resume=False, overwrite=False, began=began) is None
    Study(place, space, 0, 0.01).begin({"source": "demo"})
    assert place.check(resume=False, overwrite=False, began=began) is None, "it was not there when this search began"
    with pytest.raises(CtxextError, match="exists already"):
        place.check(resume=False, overwrite=False, began=time.time())
    replaces = place.check(resume=False, overwrite=True, began=time.time())
    first = Study(place, space, 0, 0.01, replaces)
    first.begin({"source": "other"})
    first.ask()
    joined = Study(place, space, 0, 0.01, replaces)
    with pytest.raises(CtxextError, match="other settings: source other, now demo"):
        joined.begin({"source": "demo"})
    assert not joined.is_due(1), "what the other process replaced is not replaced again"


@pytest.mark.thorough
def test_a_study_in_use_is_not_replaced(tmp_path):
    place, space = StudyPlace(path=tmp_path / "study.db"), build_space(open_checkpoint("demo"), 1024, ["ntk"])
    study = Study(place, space, 0, 0.01)
    study.begin({"source": "demo"})
    trial, _ = study.ask()
    replaces = place.check(resume=False, overwrite=True)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        trial.set_user_attr("owner", [machine_id(), other.pid, time.time()])
        with pytest.raises(CtxextError, match=f"cannot be replaced: process {other.pid} works on it"):
            Study(place, space, 0, 0.01, replaces)
        other.communicate(b"\n")
    Study(place, space, 0, 0.01, replaces).begin({"source": "other"})


def test_a_process_killed_while_it_queued_recipes_is_continued(tmp_path):
    place, space = (
        StudyPlace(path=tmp_path / "study.db"),
        build_space(open_checkpoint("demo"), 1024, ["ntk", "yarn", "pi"]),
    )
    killed = Study(place, space, 0, 0.01)
    for _, parameters in space.starts()[:2]:
        killed._study.enqueue_trial(parameters)
    study = Study(place, space, 0, 0.01)
    study.begin({"source": "demo"})
    queued = [trial.system_attrs["fixed_params"] for trial in study._study.get_trials(deepcopy=False)]
    assert queued == [parameters for _, parameters in space.starts()]


@pytest.mark.thorough
def test_a_trial_is_requeued_once(tmp_path, monkeypatch):
    """Two processes see that a third one is dead; the slower one must not take the trial from the faster one."""
    place, space = StudyPlace(path=tmp_path / "study.db"), build_space(open_checkpoint("demo"), 1024, ["ntk"])
    slow, fast = (Study(place, space, 0, 0.01) for _ in range(2))
    slow.begin({"source": "demo"})
    trial, _ = slow.ask()
    seen = slow._list_abandoned()
    assert [dead.number for dead in seen] == [trial.number]
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        list_abandoned = slow._list_abandoned

        def list_late():
            if not fast._list_abandoned():
                return list_abandoned()
            fast.rescue()
            fast.ask()[0].set_user_attr("owner", [machine_id(), other.pid, time.time()])
            return seen

        monkeypatch.setattr(slow, "_list_abandoned", list_late)
        slow.rescue()
        other.communicate(b"\n")
    (left,) = slow._study.get_trials(deepcopy=False)
    assert left.state == optuna.trial.TrialState.RUNNING


@pytest.mark.thorough
def test_a_trial_of_a_process_that_was_killed_before_it_signed_is_tried_by_another(tmp_path, monkeypatch):
    place, space = StudyPlace(path=tmp_path / "study.db"), build_space(open_checkpoint("demo"), 1024, ["ntk"])
    monkeypatch.setattr(study_module, "_SEEN_EVERY", 1.5)
    tried = []

    def try_recipe(setup, space, parameters, *others):
        tried.append(parameters)
        return None, None, "refused"

    monkeypatch.setattr(study_module, "_try_recipe", try_recipe)
    killed = Study(place, space, 0, 0.01)
    killed.begin({"source": "demo"})
    killed._study.ask()
    options = SearchOptions(target_length=1024, trials=1)
    setup = types.SimpleNamespace(
        options=options,
        stock=types.SimpleNamespace(loss=1.0),
        end=math.inf,
        reserve=lambda points: 0.0,
        watch=lambda state: None,
    )
    study_module.try_recipes(setup, space, place, {"source": "demo"})
    assert len(tried) == 1
    assert [trial.state for trial in killed._study.get_trials(deepcopy=False)] == [optuna.trial.TrialState.COMPLETE]


@pytest.mark.thorough
def test_a_trial_that_is_signed_late_is_left_to_its_process(tmp_path):
    place, space = StudyPlace(path=tmp_path / "study.db"), build_space(open_checkpoint("demo"), 1024, ["ntk"])
    study = Study(place, space, 0, 0.01)
    study.begin({"source": "demo"})
    trial = study._study.ask()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        threading.Timer(0.5, trial.set_user_attr, ("owner", [machine_id(), other.pid, time.time()])).start()
        assert not study.has_abandoned()
        other.communicate(b"\n")


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.thorough
def test_a_search_that_is_interrupted_gives_its_recipe_back(tmp_path, monkeypatch, error):
    """A process of another machine would wait for half an hour, and for that of a notebook for ever."""
    place, space = StudyPlace(path=tmp_path / "study.db"), build_space(open_checkpoint("demo"), 1024, ["ntk"])

    def interrupted(*given):
        raise error

    monkeypatch.setattr(study_module, "_try_recipe", interrupted)
    options = SearchOptions(target_length=1024, trials=2)
    setup = types.SimpleNamespace(
        options=options,
        stock=types.SimpleNamespace(loss=1.0),
        end=math.inf,
        watch=lambda state: None,
        reserve=lambda points: 0.0,
    )
    with pytest.raises(error):
        study_module.try_recipes(setup, space, place, {"source": "demo"})
    (trial,) = optuna.load_study(study_name="ctxext", storage=place.open()).get_trials()
    assert trial.state == optuna.trial.TrialState.WAITING


def test_a_process_that_has_ended_and_was_not_waited_for_is_dead(tmp_path):
    """The process that started it may be slow to ask, or never do: then nobody tried its recipe again."""
    study = Study(StudyPlace(path=tmp_path / "study.db"), build_space(open_checkpoint("demo"), 1024, ["ntk"]), 0, 0.01)
    study.begin({"source": "demo"})
    trial, _ = study.ask()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        trial.set_user_attr("owner", [machine_id(), other.pid, time.time()])
        assert study._list_abandoned() == []
        other.kill()
        os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
        assert [dead.number for dead in study._list_abandoned()] == [trial.number]


def test_the_lock_of_a_journal_leads_to_the_journal(tmp_path, monkeypatch):
    """A lock of a killed process expires by the time of the file that it leads to; for ever if it leads nowhere."""
    (tmp_path / "shared").mkdir()
    monkeypatch.chdir(tmp_path)
    links = []
    symlink = os.symlink
    monkeypatch.setattr(
        os, "symlink", lambda target, name: links.append(Path(name).parent / target) or symlink(target, name)
    )
    Study(StudyPlace(storage="shared/study.log"), build_space(open_checkpoint("demo"), 1024, ["ntk"]), 0, 0.01)
    assert links
    assert all(link.exists() for link in links)


def test_an_incomplete_line_of_a_journal_is_removed(tmp_path):
    """Left by a crash or a full disk; what was appended to it could not be read any more."""
    journal = tmp_path / "study.log"
    place, space = StudyPlace("mine", storage=str(journal)), build_space(open_checkpoint("demo"), 1024, ["ntk"])
    Study(place, space, 0, 0.01).begin({"source": "demo"})
    whole = journal.read_bytes()
    for cut in (b'{"op_c', b'{"op_code":4,"worker_id":"x","stu'):
        journal.write_bytes(whole + cut)
        study = Study(place, space, 0, 0.01)
        study.begin({"source": "demo"})
        study.ask()
        assert len(study._study.get_trials(deepcopy=False)) == 1
        assert [json.loads(line) for line in journal.read_text().splitlines()]
    journal.write_bytes(b"my notes, all in one line")
    with pytest.raises(CtxextError, match="its last line is not one of a study"):
        place.check(resume=False, overwrite=True)
    assert journal.read_bytes() == b"my notes, all in one line"


def test_the_lock_of_a_journal_that_another_process_broke_is_no_failure(tmp_path):
    """Processes that wait for the lock of a killed one break it after 30 s, and may break the next one's too."""
    backend = StudyPlace(storage=str(tmp_path / "study.log")).open()._backend
    backend._lock.acquire()
    (tmp_path / "study.log.lock").unlink()
    backend._lock.release()


@pytest.mark.parametrize("name", ["best{1}.db", "{x}.db", "100 %.db"])
@pytest.mark.thorough
def test_names_of_files_that_optuna_would_format(tmp_path, name):
    StudyPlace(path=tmp_path / name).open()
    assert (tmp_path / name).exists()


@pytest.fixture
def drivers(monkeypatch):
    """Let these drivers alone be installed."""

    def install(*installed: str) -> None:
        for name in ("psycopg", "psycopg2", "pymysql", "MySQLdb"):
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name) if name in installed else None)

    return install


@pytest.mark.parametrize(
    ("storage", "installed"),
    [
        ("postgresql://host/x", "psycopg"),
        ("postgresql://host/x", "psycopg2"),
        ("postgresql+psycopg2://host/x", "psycopg2"),
        ("mysql://host/x", "MySQLdb"),
        ("mysql://host/x", "pymysql"),
        ("mariadb://host/x", "pymysql"),
    ],
)
def test_a_driver_that_is_installed_is_chosen(drivers, storage, installed):
    """SQLAlchemy 2.0 takes psycopg2 for postgresql://, and 2.1 psycopg."""
    drivers(installed)
    assert choose_driver(make_url(storage)).get_dialect().import_dbapi() is sys.modules[installed]


@pytest.mark.parametrize(
    ("storage", "installed", "hint"),
    [
        (
            "postgresql+psycopg2",
            ("psycopg",),
            'pip install "psycopg2-binary", or use postgresql+psycopg:// in --storage',
        ),
        (
            "postgresql+psycopg",
            ("psycopg2",),
            'pip install "psycopg[binary]", or use postgresql+psycopg2:// in --storage',
        ),
        ("mysql+pymysql", (), 'pip install "pymysql", or use mysql+mysqldb:// in --storage'),
        ("mysql", (), 'pip install "mysqlclient", or pip install "pymysql"'),
        (
            "postgresql+asyncpg",
            ("psycopg",),
            "use postgresql+psycopg:// in --storage, or use postgresql+psycopg2:// in",
        ),
        ("postgres", ("psycopg",), "Use postgresql://, or the path of a journal file."),
        ("postgresql+psycopg3", ("psycopg",), "Use postgresql+psycopg:// or postgresql+psycopg2://."),
        ("redis", (), "Use postgresql://, mysql://, mariadb://, sqlite://, or the path of a journal file."),
    ],
)
def test_the_hint_names_the_driver_of_the_url(drivers, monkeypatch, storage, installed, hint):
    drivers(*installed)
    monkeypatch.setitem(sys.modules, "asyncpg", types.ModuleType("asyncpg"))
    with pytest.raises(CtxextError) as error:
        choose_driver(make_url(f"{storage}://u:hunter2@host/x"))
    assert error.value.hint.startswith(hint)
    assert f'"{storage}://"' in error.value.message
    assert "hunter2" not in error.value.message + error.value.hint


def test_both_drivers_are_named_if_the_url_names_none(drivers):
    drivers()
    with pytest.raises(CtxextError) as error:
        choose_driver(make_url("postgresql://host/x"))
    assert sorted(error.value.hint.split(", or ")) == ['pip install "psycopg2-binary"', 'pip install "psycopg[binary]"']
