"""Searches that are started together on a study that does not exist yet: in SQLite, a journal and PostgreSQL."""

import multiprocessing
import os
import sys
import time
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState

from ctxext.checkpoint.opening import open_checkpoint
from ctxext.cli.app import main
from ctxext.errors import CtxextError
from ctxext.search.options import StudyPlace
from ctxext.search.space import build_space
from ctxext.search.study import Study

FORKS = multiprocessing.get_context("fork")
SERVER = (pytest.mark.slow, pytest.mark.database)
PLACES = ("sqlite", "sqlite URL", "journal", pytest.param("postgresql", marks=SERVER))
WORDS = ("--target-length", 400, "--samples", 4, "--checked", 2, "--lengths", 400, "--keep-short", 5, "--seed", 3)
WORDS = (*WORDS, "--methods", "ntk,yarn,longrope", "--trials", 12, "-q")


@pytest.fixture
def place(request, tmp_path) -> StudyPlace:
    """The place of a study that does not exist."""
    kind = request.param
    if kind == "postgresql":
        return StudyPlace("four", storage=request.getfixturevalue("postgres").create(f"{tmp_path.name}-{os.getpid()}"))
    if kind == "journal":
        return StudyPlace("four", storage=str(tmp_path / "study.log"))
    if kind == "sqlite URL":
        return StudyPlace("four", storage=f"sqlite:///{tmp_path / 'study.db'}")
    return StudyPlace(path=tmp_path / "study.db")


def trials_of(place: StudyPlace) -> list[optuna.trial.FrozenTrial]:
    """All trials; none before the study exists."""
    with place.lock():
        if not place.get_creation_time():
            return []
        return optuna.load_study(study_name=place.name, storage=place.open()).get_trials(deepcopy=False)


def begin(place, space, together, errors, overwrite) -> None:
    """What a search does first, at the same moment as the others."""
    together.wait()
    try:
        replaces = place.check(resume=False, overwrite=overwrite, began=time.time() - 60 * (not overwrite))
        together.wait()
        Study(place, space, 0, 0.01, replaces).begin({"source": "demo"})
        errors.put("")
    except BaseException as error:
        errors.put(f"{type(error).__name__}: {error}")


def begin_four(place, space, overwrite=False) -> list[str]:
    together, errors = FORKS.Barrier(4), FORKS.Queue()
    processes = [FORKS.Process(target=begin, args=(place, space, together, errors, overwrite)) for _ in range(4)]
    for process in processes:
        process.start()
    said = [errors.get(timeout=120) for _ in processes]
    for process in processes:
        process.join()
    return [error for error in said if error]


@pytest.mark.parametrize("place", PLACES, indirect=True)
@pytest.mark.thorough
def test_four_create_a_study(place, tmp_path):
    space = build_space(open_checkpoint("demo"), 1024, ["ntk", "yarn"])
    assert begin_four(place, space) == []
    queued = [trial.system_attrs["fixed_params"] for trial in trials_of(place)]
    assert queued == [parameters for _, parameters in space.starts()], "each is queued once, in order"
    assert begin_four(place, build_space(open_checkpoint("demo"), 1024, ["pi"]), overwrite=True) == []
    assert [trial.system_attrs["fixed_params"]["schedule"] for trial in trials_of(place)] == ["pi"], (
        "it is replaced once"
    )
    assert {path.name for path in tmp_path.iterdir()} <= {"study.db", "study.log"}, "no lock is left"


def execute(words: tuple, log: Path) -> None:
    """The command, in a fork."""
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv = ["ctxext", *map(str, words)]
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    main()


@pytest.mark.slow
@pytest.mark.database
@pytest.mark.parametrize("place", ["sqlite", "journal", "postgresql"], indirect=True)
def test_four_searches_and_one_is_killed(place, source, tmp_path):
    words = ("--study", place.path) if place.path else ("--storage", place.storage, "--study", place.name)
    logs = [tmp_path / f"{number}.log" for number in range(4)]
    processes = {}
    for log in logs:
        command = ("search", source, log.with_suffix(".yaml"), *WORDS, *words)
        process = FORKS.Process(target=execute, args=(command, log))
        process.start()
        processes[process.pid] = process
    killed = None
    while killed is None:
        assert any(process.is_alive() for process in processes.values()), "all ended before one could be killed"
        time.sleep(0.2)  # Without a pause, the others would rarely get the lock.
        trials = trials_of(place)
        running = [trial for trial in trials if trial.state == TrialState.RUNNING and trial.user_attrs.get("owner")]
        if running and any(trial.state == TrialState.COMPLETE for trial in trials):
            killed = processes.pop(running[0].user_attrs["owner"][1])
            killed.kill()
    for process in processes.values():
        process.join(900)
    said = "".join(log.read_text() for log in logs)
    assert [process.exitcode for process in processes.values()] == [0, 0, 0], said
    trials = trials_of(place)
    assert all(trial.state == TrialState.COMPLETE for trial in trials), "what the dead one tried is tried by another"
    assert [trial.number for trial in trials] == list(range(len(trials)))
    # Several may begin their last trial at the same time.
    assert 12 <= len(trials) <= 14
    assert sorted(trial.user_attrs.get("published") or "" for trial in trials)[-2:] == ["ntk", "yarn"]
    assert sum("published" in trial.user_attrs for trial in trials) == 3, "published ones and longrope's start, once"
    assert "correct-horse" not in said


@pytest.mark.slow
@pytest.mark.database
class TestPostgreSQL:
    """What a server refuses is one line, and a lock ends with its process."""

    @pytest.mark.parametrize("scheme", ["postgresql", "postgresql+psycopg", "postgresql+psycopg2"])
    @pytest.mark.parametrize(
        ("database", "password", "message"),
        [
            ("postgres", "wrong-horse-battery", "password authentication failed"),
            ("nowhere", None, 'database "nowhere" does not exist'),
            ("down", None, "refused"),
        ],
    )
    def test_what_cannot_be_reached_is_one_line(self, postgres, scheme, database, password, message):
        named = {"password": password} if password else {}
        url = postgres.url(database, scheme=scheme, **named)
        place = StudyPlace(storage=url.replace(str(postgres.port), "9") if database == "down" else url)
        with pytest.raises(CtxextError, match=message) as error:
            place.check(resume=False, overwrite=False)
        assert "\n" not in error.value.message
        assert "horse" not in error.value.message + error.value.hint

    def test_a_check_creates_no_tables(self, postgres):
        place = StudyPlace(storage=postgres.create("untouched"))
        assert place.check(resume=False, overwrite=False) is None
        with pytest.raises(CtxextError, match="does not exist"):
            place.check(resume=True, overwrite=False)
        import sqlalchemy

        engine = sqlalchemy.create_engine(postgres.url("untouched", scheme="postgresql+psycopg"))
        assert sqlalchemy.inspect(engine).get_table_names() == []
        engine.dispose()

    def test_the_lock_of_a_killed_process_is_free(self, postgres):
        place = StudyPlace(storage=postgres.create("locked"))
        held = FORKS.Event()

        def hold() -> None:
            with place.lock():
                held.set()
                time.sleep(600)

        process = FORKS.Process(target=hold)
        process.start()
        assert held.wait(60)
        process.kill()
        began = time.monotonic()
        with place.lock():
            assert time.monotonic() - began < 30
        process.join()
