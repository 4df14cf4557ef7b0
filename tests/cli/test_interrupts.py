"""The exit code of every way in which a command ends, asked in this process."""

import signal
import subprocess
import sys
import time
from typing import Any

import pytest
import typer

from ctxext.cli import app as command_line
from ctxext.cli.interrupts import INTERRUPTED
from ctxext.errors import CtxextError


@pytest.fixture
def ended(monkeypatch):
    """Gives the exit code of the command line where this is what a command raises or returns."""
    monkeypatch.setattr(command_line, "install_exception_hooks", lambda: None)
    monkeypatch.setattr(command_line, "remember_arguments", lambda words: None)
    monkeypatch.setattr(command_line, "_make_streams_safe", lambda: None)
    monkeypatch.setenv("USE_HUB_KERNELS", "NO")

    def call(outcome: Any) -> int:
        commands = typer.Typer(cls=command_line._Commands, pretty_exceptions_enable=False)
        commands.callback()(lambda: None)

        @commands.command("work")
        def work() -> Any:
            if isinstance(outcome, BaseException):
                raise outcome
            return outcome

        monkeypatch.setattr(command_line, "app", lambda: commands(["work"]))
        with pytest.raises(SystemExit) as stop:
            command_line.main()
        return stop.value.code

    return call


@pytest.mark.parametrize(
    ("outcome", "code"),
    [
        (None, 0),
        ("a result", 0),
        (0, 0),
        (3, 3),
        (typer.Exit(), 0),
        (typer.Exit(4), 4),
        (typer.Abort(), 1),
        (typer.BadParameter("no"), 2),
        (CtxextError("no"), 1),
        (ValueError("no"), 1),
        (MemoryError(), 1),
        (SystemExit(5), 5),
    ],
    ids=repr,
)
def test_of_what_a_command_returns_or_raises(outcome, code, ended):
    assert ended(outcome) == code


@pytest.mark.parametrize("outcome", [SystemExit(INTERRUPTED), typer.Exit(INTERRUPTED), KeyboardInterrupt()], ids=repr)
def test_after_an_interrupt_the_process_ends_at_once(outcome, ended, monkeypatch):
    class LeftError(Exception):
        pass

    codes = []

    def leave(code):
        codes.append(code)
        raise LeftError

    monkeypatch.setattr(command_line.os, "_exit", leave)
    with pytest.raises(LeftError):
        ended(outcome)
    assert codes == [INTERRUPTED]


@pytest.mark.parametrize(
    ("words", "code"),
    [(["--version"], 0), (["--help"], 0), ([], 2), (["nothing"], 2), (["merge"], 2), (["inspect"], 2)],
)
def test_of_command_lines(words, code, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["ctxext", *words])
    with pytest.raises(SystemExit) as stop:
        command_line.app()
    assert stop.value.code == code


SWALLOWED = """
while True:
    try:
        time.sleep(0.05)
    except KeyboardInterrupt:
        pass
"""
LONG = "ctypes.PyDLL(None) and ctypes.CDLL(None).sleep(30)"
PROGRAM = """
import ctypes, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)
from ctxext.cli.interrupts import exit_on_interrupt
with exit_on_interrupt(lambda: print("go on", flush=True)):
    print("ready", flush=True)
{}
"""


@pytest.mark.parametrize("work", [SWALLOWED, LONG, "time.sleep(30)"], ids=["swallowed", "long", "plain"])
def test_ctrl_c_stops_and_prints_how_to_resume(work):
    lines = "\n".join(f"    {line}" for line in work.strip().splitlines())
    command = [sys.executable, "-c", PROGRAM.format(lines)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        output = process.stdout.read()
        assert process.wait() != 0
        assert time.monotonic() - began < 5
    assert output == "go on\n"
