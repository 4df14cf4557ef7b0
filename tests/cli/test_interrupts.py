"""Ctrl-C is answered at once, even where what it raises is swallowed or an operation takes long."""

import signal
import subprocess
import sys
import time

import pytest

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
from ctxext.cli.interrupts import answered_at_once
with answered_at_once(lambda: print("go on", flush=True)):
    print("ready", flush=True)
{}
"""


@pytest.mark.parametrize("work", [SWALLOWED, LONG, "time.sleep(30)"], ids=["swallowed", "long", "plain"])
def test_ctrl_c_ends_it_and_says_how_to_go_on(work):
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
