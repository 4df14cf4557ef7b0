"""All printing: results on stdout, everything else on stderr, in human, JSON and quiet form.

Text is safe for a terminal: no markup, no control characters, and errors on one line. The streams redact secrets.
"""

import dataclasses
import json
import logging
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.highlighter import NullHighlighter
from rich.segment import Segment
from rich.text import Text

from ctxext.errors import CtxextError
from ctxext.files.content import Progress
from ctxext.options import option
from ctxext.redaction import SECRET_FLAGS, escape_json, keep_styles, shorten, visible

_LONGEST = 2000
"""Maximum number of displayed characters of an error; a configuration may contain a word of any length."""


class SafeConsole(Console):
    """A console that prints strings literally. Only `Text` adds colours."""

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, highlight=False, soft_wrap=True, markup=False, emoji=False)

    @property
    def file(self) -> IO[str]:
        """The stream for text with styles, which is escaped otherwise."""
        stream: IO[str] = keep_styles(super().file)
        return stream

    @file.setter
    def file(self, stream: IO[str]) -> None:
        self._file = stream

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Print segments with control characters escaped."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible(segment.text), segment.style)


def in_one_line(text: str) -> str:
    """Return a message on one line, cut to a readable length."""
    return shorten(text, _LONGEST)


def bold(text: Any) -> Text:
    """Return a bold text, for headings and names."""
    return Text(str(text), style="bold")


def done_line(name: Any, rest: str) -> Text:
    """Return the line that reports a written file or folder."""
    return Text.assemble(("✓", "green"), " ", (str(name), "bold"), f"   {rest}")


def mark_line(mark: str, colour: str, rest: str) -> Text:
    """Return a line that begins with a coloured mark."""
    return Text.assemble((mark, colour), f" {rest}")


def format_relative(difference: float) -> str:
    """Format a relative difference."""
    return f"relative difference {difference:.0e}" if difference else "identical"


REPORTING = "Output"
"""The panel of these options, the last of each help."""

_DAY = 86_400.0
"""Seconds of progress for an estimate of the remaining time: a single step may take minutes."""
_TIME_LEFT = re.compile(r"\d (s|min|h) left\b")
"""The remaining time in a label."""


def _switch(*flags: str, help: str) -> Any:
    return option(False, flags=flags, help=help, panel=REPORTING, kept=False)


@dataclass
class Output:
    """Output of a command, on stdout and stderr."""

    as_json: bool = _switch("--json", help="Print one JSON object on stdout.")
    quiet: bool = _switch("-q", "--quiet", help="Hide progress, notes and suggestions.")
    verbose: bool = _switch("-v", "--verbose", help="Show debug messages.")

    def __post_init__(self) -> None:
        self.stdout = SafeConsole()
        self.stderr = SafeConsole(stderr=True)
        if self.verbose:
            self._show_log()

    def _show_log(self) -> None:
        """Print the package's log at level DEBUG, for bug reports."""
        from rich.logging import RichHandler

        log = logging.getLogger("ctxext")
        log.handlers[:] = [
            RichHandler(console=self.stderr, show_path=False, markup=False, highlighter=NullHighlighter())
        ]
        log.setLevel(logging.DEBUG)

    def result(self, content: Mapping[str, Any], *lines: RenderableType) -> None:
        """Print a command's result: its data as JSON, or its lines for people."""
        if self.as_json:
            sys.stdout.write(escape_json(json.dumps(content, ensure_ascii=False, indent=2)) + "\n")
            return
        for line in lines:
            self.stdout.print(line)

    def schema(self, content: Mapping[str, Any]) -> None:
        """Print a JSON Schema, also without --json."""
        dataclasses.replace(self, as_json=True).result(content)

    def note(self, text: RenderableType) -> None:
        """Print progress or a remark."""
        if not self.quiet:
            self.stderr.print(text)

    def warning(self, text: str) -> None:
        """Print a warning, in quiet mode too."""
        self.stderr.print("warning: ", style="yellow bold", end="")
        self.stderr.print(text)

    def next_step(self, *words: object, why: str = "Next") -> None:
        """Suggest the next command, given as words, quoted for a shell."""
        if not self.quiet:
            self.stderr.print(f"{why}: ", style="dim", end="")
            self.stderr.print(shlex.join(map(str, words)), style="cyan")

    @contextmanager
    def progress(self, title: str) -> Iterator[Progress]:
        """Show a progress bar on a terminal, or occasional plain lines in a log; yield the function to advance it."""
        if self.quiet:
            yield lambda label, done, total: None
        elif self.stderr.is_terminal:
            from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
            from rich.progress import Progress as Bar

            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"))
            times = (TimeElapsedColumn(), time_left_column())
            with Bar(*columns, *times, console=self.stderr, transient=True, speed_estimate_period=_DAY) as bar:
                task = bar.add_task(title, total=None)

                def advance(label: str, done: int, total: int) -> None:
                    bar.update(task, completed=done, total=total, description=f"{title} {label}".strip())

                yield advance
        else:
            yield self._plain_progress(title)

    def _plain_progress(self, title: str) -> Progress:
        """Return a function that prints a line at the start of each stage and at every tenth of it."""
        shown, stage = -1, ""

        def advance(label: str, done: int, total: int) -> None:
            nonlocal shown, stage
            tenth = 10 * done // max(total, 1)
            if done == 0 and label != stage:
                shown, stage = -1, label
            if tenth > shown:
                shown = tenth
                self.stderr.print(f"{title} {label}".strip() + f" {10 * tenth} %")

        return advance


def time_left_column() -> Any:
    """Return the column of a bar's time left; it is empty if the label contains another estimate."""
    from rich.progress import TimeRemainingColumn

    class TimeLeft(TimeRemainingColumn):
        def render(self, task: Any) -> Text:
            if _TIME_LEFT.search(task.description) or task.time_remaining is None:
                return Text()
            return super().render(task).append(" left")

    return TimeLeft()


def wants_json() -> bool:
    """Return whether the command line contains `--json`; errors may occur before it is parsed."""
    return "--json" in sys.argv[1:]


def print_error(error: CtxextError) -> None:
    """Print an error in one line on stderr, and its hint if it has one; with `--json` also as JSON on stdout.

    The object is {"error": {"message": "...", "hint": "..."}}; the hint is empty if there is none.
    """
    if wants_json():
        content = {"message": in_one_line(error.message), "hint": in_one_line(error.hint)}
        Output(as_json=True).result({"error": content})
    console = SafeConsole(stderr=True)
    console.print("error: ", style="red bold", end="")
    console.print(in_one_line(error.message))
    if error.hint:
        console.print("hint:  ", style="cyan", end="")
        console.print(in_one_line(error.hint))


def same_command(*more: str) -> list[str]:
    """Return the words of the current command without secrets, with the words of `more` at the end, each only once."""
    words = [Path(sys.argv[0]).name, *sys.argv[1:]]
    if words[0] in ("__main__.py", "-m", "-c"):
        words[0] = "ctxext"
    pairs = pairwise(["", *words])
    words = [word for before, word in pairs if not {before, word.partition("=")[0]} & {*SECRET_FLAGS}]
    return [*(word for word in words if word not in more), *more]


def resuming_command(*more: str) -> list[str]:
    """Return the typed command with --resume, and without --overwrite, which would delete the results."""
    return [word for word in same_command(*more, "--resume") if word != "--overwrite"]
