"""What the processes of a run exchange: claims, counts, decisions of the first one, and their devices."""

import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from ctxext.checkpoint.loading import choose_device
from ctxext.errors import CtxextError
from ctxext.evaluate import processes, run
from ctxext.evaluate.plan import plan_questions
from ctxext.evaluate.processes import Team, is_first_error, take_device
from ctxext.evaluate.results_log import ResultsLog
from ctxext.evaluate.run import Meter, Run
from ctxext.files.processes import total_memory
from ctxext.models.model import Loading, load_model
from ctxext.tasks.base import keys_of
from ctxext.tasks.settings import Settings


def without_seconds(report):
    if isinstance(report, dict):
        return {key: without_seconds(value) for key, value in report.items() if key != "seconds"}
    return [without_seconds(value) for value in report] if isinstance(report, list) else report


@pytest.fixture
def teams(monkeypatch):
    """Three processes of a run, with a store in memory."""
    store = torch.distributed.HashStore()
    monkeypatch.setattr(processes, "_connect", lambda: store)
    monkeypatch.setattr(processes, "_runs", iter([7, 7, 7]))
    return [Team(rank, 3) for rank in range(3)]


def test_one_process_takes_each_work(teams):
    taken = [[team.takes(str(work)) for team in teams] for work in range(4)]
    assert taken == [[True, False, False]] * 4
    alone = Team(0, 1)
    assert [alone.takes("a"), alone.takes("a"), alone.takes("b")] == [True, False, True]


@pytest.mark.parametrize("minutes", [math.inf, pytest.param(5, marks=pytest.mark.thorough)])
def test_processes_give_the_report_of_one(checkpoint, teams, minutes, monkeypatch, tmp_path):
    monkeypatch.setattr(run, "only_run_in", nullcontext)  # Processes are threads here.
    settings = Settings(tasks=("needle", "kv", "short"), lengths=(320,), depths=(0.0, 1.0), samples=3, kv_ids="number")
    plans, loading = plan_questions([str(checkpoint)], settings, Loading(device="cpu")), Loading(device="cpu")
    models = [load_model(plans[0].info, loading) for _ in teams]
    all_begin = threading.Barrier(len(teams))  # Otherwise the first might do everything before the others begin.

    def load(team):
        if team.size > 1:
            all_begin.wait(60)
        return models[team.rank]

    def measure(team):
        out, end = tmp_path / str(team.size), time.monotonic() + 60 * minutes
        return Run(plans, settings, loading, lambda _: load(team), out, False, False, end=end, team=team).report()

    whole = measure(Team(0, 1))
    with ThreadPoolExecutor(3) as pool:
        shared, *others = pool.map(measure, teams)
    assert others == [{}, {}]
    assert [len(list((tmp_path / name).glob("cells*.jsonl"))) for name in "13"] == [1, 3]
    assert without_seconds(shared) == without_seconds(whole)
    records = ResultsLog(tmp_path / "3").records()
    assert sum(len(keys_of(record)) for record in records if "task" in record) == 2 * 2 * 3 + 3, "something ran twice"


def test_the_first_process_decides_for_all(teams):
    values = []
    others = [threading.Thread(target=lambda team=team: values.append(team.share("a", None))) for team in teams[1:]]
    for thread in others:
        thread.start()
    assert teams[0].share("a", lambda: {"order": [1, 0]}) == {"order": [1, 0]}
    for thread in others:
        thread.join(20)
    assert values == [{"order": [1, 0]}] * 2
    assert [team.agree("batch", number) for team, number in zip(teams, (5, 3, 8), strict=True)] == [5, 5, 5]
    assert Team(0, 1).share("a", lambda: 3) == Team(0, 1).agree("a", 3) == 3


def test_an_error_of_the_first_process_is_raised_in_all(teams):
    def fail():
        raise CtxextError("Broken.", hint="Repair it.")

    for team in teams:
        with pytest.raises(CtxextError) as raised:
            team.share("a", fail)
        assert (raised.value.message, raised.value.hint) == ("Broken.", "Repair it.")


def test_the_first_process_shows_the_progress_of_all(teams):
    info = SimpleNamespace(name="m", checkpoint=SimpleNamespace(config={"model_type": "llama"}))
    plans, shown, clock = [SimpleNamespace(info=info, measured_lengths=[64] * 8)], [], [0.0]
    first, second = (
        Meter(plans, progress, 4, clock=lambda: clock[0], team=team)
        for team, progress in zip(teams[:2], (lambda *given: shown.append(given), None), strict=True)
    )
    cost = first.cost("m", [64])
    second.advance("m", [64] * 2, "")
    clock[0] = 30.0
    first.advance("m", [64] * 3, "m needle")
    assert shown[-1] == ("m needle (10 s left)", 5 * cost, 8 * cost)  # 3 more, at the pace of 3 × 10 s in 3 processes.
    second.advance("m", [64] * 3, "")
    first.wait()
    assert shown[-1] == ("waiting for the other processes", 8 * cost, 8 * cost)


def test_a_lost_connection_and_a_launcher_without_address_are_explained(monkeypatch):
    processes._connect.cache_clear()
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(CtxextError, match=r"Lost the connection to the other processes: .*MASTER_ADDR"):
        Team().takes("a")


def test_one_process_reports_an_error(teams, monkeypatch):
    monkeypatch.setattr(processes, "_GRACE", 0.01)
    assert [is_first_error() for _ in teams] == [True] * 3  # Without a launcher.
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert [is_first_error() for _ in teams] == [True, False, False]

    def fail():
        raise RuntimeError("Connection reset by peer")

    monkeypatch.setattr(processes, "_connect", fail)
    assert is_first_error()


@pytest.mark.parametrize(
    ("device", "count", "message"),
    [
        ("auto", "4", r"This machine has fewer devices of type cuda \(2\) than processes \(4\)."),
        ("cuda", "3", "fewer devices"),
        ("cuda:1", "2", '2 processes cannot share the device "cuda:1".'),
    ],
)
def test_each_process_needs_a_device(device, count, message, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    current = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    take_device(device)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", count)
    with pytest.raises(CtxextError, match=message):
        take_device(device)
    take_device("cpu")
    assert current == []
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    take_device("auto")
    assert [choose_device("cuda")] == current == [torch.device("cuda", 1)]


def test_processes_share_the_memory_of_the_machine(monkeypatch):
    whole = total_memory(torch.device("cpu"))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert total_memory(torch.device("cpu")) == whole // 2
