"""What the processes of a run exchange: claims, counts, decisions of the first one, and their devices."""

import os
import threading
from types import SimpleNamespace

import pytest
import torch

from ctxext.checkpoint.loading import choose_device
from ctxext.errors import CtxextError
from ctxext.evaluate import processes
from ctxext.evaluate.processes import Team, check_devices
from ctxext.evaluate.run import Meter
from ctxext.files.processes import LAUNCHER, Terminated, total_memory


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
    with pytest.raises(CtxextError, match=r"Lost the connection to the first process: .*MASTER_ADDR"):
        Team().takes("a")


def test_processes_end_if_their_launcher_was_killed(teams, monkeypatch):
    monkeypatch.setenv(LAUNCHER, str(os.getppid()))
    assert teams[0].takes("a")
    monkeypatch.setenv(LAUNCHER, "1" if os.getppid() != 1 else "2")
    with pytest.raises(Terminated):
        teams[0].takes("b")


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
    check_devices(device)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", count)
    with pytest.raises(CtxextError, match=message):
        check_devices(device)
    check_devices("cpu")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    check_devices("auto")
    assert choose_device("cuda") == torch.device("cuda", 1)


def test_processes_share_the_memory_of_the_machine(monkeypatch):
    whole = total_memory(torch.device("cpu"))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert total_memory(torch.device("cpu")) == whole // 2
