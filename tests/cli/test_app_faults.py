"""What no part of a command tells itself ends in one line too; the traceback is for those who ask for it."""

import os
import subprocess
import sys

import pytest

from ctxext.cli.app import FAULT, NO_MEMORY, TOO_DEEP

SECRET = "hf_TopSecretTopSecretTopSecret"
RAISES = """
import sys, threading
from ctxext.cli import app
from ctxext.errors import CtxextError
from ctxext.checkpoint.geometry import check_sizes
from ctxext.checkpoint.opening import hub_token
def dive(): return dive()
class Panic(BaseException): pass
def fail():
    {}
app.app = fail
app.main()
"""


@pytest.fixture
def raised(our_processes):
    """Gives what the command line says where this is what a command does."""

    def call(what: str, **environment: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-c", RAISES.format(what)]
        given = {**{key: value for key, value in os.environ.items() if key != "CTXEXT_TRACEBACK"}, **environment}
        return our_processes.run(command, capture_output=True, text=True, env=given, check=False)

    return call


@pytest.mark.parametrize(
    ("what", "said"),
    [
        (f"raise ValueError('a\\n\\x1b[31mBearer {SECRET}')", f"{FAULT}: ValueError: a \\x1b[31mBearer … ("),
        ("raise ValueError('x' * 9999)", "xxx…"),
        ("hub_token('b' * 20); raise ValueError('x' * 290 + 'b' * 20)", "xxx… (cli"),
        ("raise ValueError", f"{FAULT}: ValueError ("),
        ("check_sizes(7, 'x')", "AttributeError: 'int' object has no attribute 'get' (checkpoint/families.py:"),
        ("raise Panic('rust')", f"{FAULT}: Panic: rust"),
        ("raise MemoryError", NO_MEMORY),
        ('raise RuntimeError("DefaultCPUAllocator: can\'t allocate memory")', NO_MEMORY),
        ("dive()", TOO_DEEP),
        ("open('/nonexistent/file')", '"/nonexistent/file": No such file or directory.'),
        ("raise CtxextError('as ever')", "error: as ever"),
    ],
)
def test_whatever_is_raised_is_one_line_and_no_traceback(what, said, raised):
    result = raised(what)
    assert result.returncode == 1
    assert result.stderr.startswith("error: ")
    assert said in result.stderr
    assert result.stderr.count("\n") <= 2
    assert len(result.stderr) < 800
    assert not [bad for bad in ("Traceback", SECRET[3:], "\x1b") if bad in result.stderr]


def test_a_traceback_is_shown_on_request_without_tokens(raised):
    result = raised(f"raise ValueError('Bearer {SECRET}\\n\\x1b[31m')", CTXEXT_TRACEBACK="1")
    assert result.stderr.startswith("Traceback (most recent call last):\n")
    assert "in fail\n" in result.stderr
    assert "ValueError: Bearer …\n" in result.stderr
    assert f"error: {FAULT}" in result.stderr
    assert SECRET[3:] not in result.stderr
    assert "\x1b" not in result.stderr


@pytest.mark.thorough
def test_threads_print_no_traceback_either(raised):
    thread = "thread = threading.Thread(target=dive); thread.start(); thread.join()"
    assert raised(thread).stderr == ""
    assert TOO_DEEP in raised(thread, CTXEXT_TRACEBACK="1").stderr


@pytest.mark.parametrize(
    "line",
    ["demo", "demo --json >&-", "demo >/dev/full", "demo --json | head -c 1", "nothing 2>&-", "nothing 2>/dev/full"],
)
def test_streams_that_are_closed_full_or_of_few_signs(line):
    """Each in a process of its own, as the streams are those that Python begins with."""
    command = f"{sys.executable} -m ctxext inspect {line}"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=environment, check=False)
    assert result.returncode in (0, 1), result.stderr
    assert not [bad for bad in ("Traceback", FAULT, "Exception ignored", "Fatal") if bad in result.stderr]
