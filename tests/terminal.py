"""Run a command in a pseudo-terminal, and measure how long it shows no visible change."""

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_STYLE = re.compile(r"\x1b\[[\d;?]*[A-Za-z]")


@dataclass(frozen=True)
class Shown:
    """What a terminal received.

    Attributes:
        code: The exit code.
        raw: Everything that was written.
        silence: The longest time without a change of the text, in seconds.
        work: The processor time of the command in that time, which another load of the machine does not change.
        before: The line that stood still for so long.
        seconds: The duration of the command.
        processor: Its processor time in seconds, with that of its processes.
    """

    code: int
    raw: str
    silence: float
    work: float
    before: str
    seconds: float
    processor: float

    @property
    def lines(self) -> list[str]:
        """The lines that the screen showed at any time, without styles."""
        return [line for line in re.split(r"[\r\n]+", _STYLE.sub("", self.raw)) if line.strip()]

    @property
    def left(self) -> list[str]:
        """The lines that stay on the screen: a bar erases its own."""
        screen, row, column = [""], 0, 0
        for token in re.findall(r"\x1b\[[\d;?]*[A-Za-z]|[\r\n]|[^\x1b\r\n]+", self.raw):
            if token == "\n":
                row, column = row + 1, 0
                screen += [""] * (row == len(screen))
            elif token == "\r":
                column = 0
            elif token == "\x1b[2K":
                screen[row] = ""
            elif token.startswith("\x1b[") and token.endswith("A"):
                row -= int(token[2:-1] or 1)
            elif not token.startswith("\x1b"):
                line = screen[row].ljust(column)
                screen[row] = line[:column] + token + line[column + len(token) :]
                column += len(token)
        return [line.strip() for line in screen if line.strip()]


def _processor_time(process: int) -> float:
    """Return the processor time of a process in seconds, without that of its children."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def watch(
    words: Sequence[object],
    folder: Path,
    *,
    first: float = 60,
    columns: int = 80,
    interrupt_at: str | None = None,
    **environment: str,
) -> Shown:
    """Run a command of ctxext in a terminal.

    Args:
        words: The words after the name of the program.
        folder: The working folder.
        first: The seconds from the start in which silence counts.
        columns: The width of the terminal.
        interrupt_at: Text at which Ctrl-C is typed.
        environment: Further environment variables.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    variables = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    variables |= {"TERM": "xterm-256color", "HF_HUB_OFFLINE": "1", **environment}
    before, started = os.times(), time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "ctxext", *map(str, words)],
        **{"stdin": theirs, "stdout": theirs, "stderr": theirs, "cwd": folder, "env": variables},
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(theirs)
    raw, last, changed_at, silence, is_interrupted = "", "", started, (0.0, 0.0, ""), False
    worked = 0.0
    while True:
        ready, _, _ = select.select([ours], [], [], 0.1)
        content = b""
        if ready:
            with contextlib.suppress(OSError):  # Linux reports the end of the other side as an error.
                content = os.read(ours, 1 << 16)
        now = time.monotonic()
        text = content.decode(errors="replace")
        raw += text
        changed = [line for line in re.split(r"[\r\n]+", _STYLE.sub("", text)) if line.strip() and line != last]
        if changed or (ready and not content):
            work = _processor_time(process.pid)
            if changed_at - started < first:
                silence = max(silence, (now - changed_at, work - worked, last))
            changed_at, worked, last = now, work, changed[-1] if changed else last
        if interrupt_at and not is_interrupted and interrupt_at in _STYLE.sub("", raw):
            is_interrupted = True
            os.killpg(process.pid, signal.SIGINT)
        if ready and not content:
            break
    os.close(ours)
    code, after = process.wait(), os.times()
    processor = after.children_user + after.children_system - before.children_user - before.children_system
    return Shown(code, raw, *silence, time.monotonic() - started, processor)
