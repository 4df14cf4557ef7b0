"""No downloads while other packages are imported, and downloads as before afterwards."""

import socket
import subprocess
import sys
import threading

import huggingface_hub.constants
import pytest

from ctxext.files.offline import forbid_network

REMOTE = ("example.invalid", 80)
IMPORTED = """
import huggingface_hub
from ctxext.files.offline import forbid_network
with forbid_network():
    import datasets
    assert datasets.config.HF_HUB_OFFLINE and huggingface_hub.is_offline_mode()
print([bool(flag) for flag in (datasets.config.HF_HUB_OFFLINE, huggingface_hub.is_offline_mode())])
"""


@pytest.fixture
def online(monkeypatch):
    """A process that is not offline, whose look-ups of names are recorded and fail."""
    names = []
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *others: names.append(host))
    return names


@pytest.mark.parametrize(("variable", "is_offline"), [("0", False), ("1", True)])
@pytest.mark.thorough
def test_a_package_that_copies_the_offline_flag_is_as_offline_as_the_process(variable, is_offline, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", variable)
    monkeypatch.delenv("HF_DATASETS_OFFLINE", raising=False)
    result = subprocess.run([sys.executable, "-c", IMPORTED], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"{[is_offline, is_offline]}\n"


def test_contexts_of_two_threads_that_overlap_end_as_they_began(online):
    """The first ends while the second is still importing."""
    before = socket.getaddrinfo
    entered, ended = threading.Event(), threading.Event()

    def import_slowly():
        with forbid_network():
            entered.set()
            ended.wait(10)
            with pytest.raises(socket.gaierror):
                socket.getaddrinfo(*REMOTE)

    other = threading.Thread(target=import_slowly)
    with forbid_network():
        other.start()
        assert entered.wait(10)
    ended.set()
    other.join()
    assert socket.getaddrinfo is before
    assert not huggingface_hub.constants.HF_HUB_OFFLINE
    socket.getaddrinfo(*REMOTE)
    assert online == [REMOTE[0]]


def test_only_this_machine_is_contacted(online):
    with forbid_network():
        assert huggingface_hub.constants.HF_HUB_OFFLINE
        with forbid_network():
            socket.getaddrinfo("localhost", 80)
        with pytest.raises(socket.gaierror, match="not contacted"):
            socket.getaddrinfo(*REMOTE)
    with forbid_network(kernels=True):
        socket.getaddrinfo(*REMOTE)
    assert online == ["localhost", REMOTE[0]]
