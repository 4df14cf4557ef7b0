"""The console, which prints text literally and breaks lines between words, and progress in a terminal or a notebook."""

import functools
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import IO, Any, ParamSpec, TypeVar, cast

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from ctxext.files.content import Progress
from ctxext.files.processes import rank
from ctxext.notebook import LiveLine, is_notebook
from ctxext.redaction import keep_styles, visible

_DAY = 86_400.0
"""Seconds of progress for an estimate of the remaining time: a single step may take minutes."""
_WORD = re.compile(r"^\s+|\S+\s*")
_TIME_LEFT = re.compile(r"\d (s|min|h) left\b")
"""The remaining time in a label."""
_NARROW, _FIGURES = 100, 14
"""Columns of a terminal without room for a bar, and of the share and the elapsed time."""
_REFRESH = 1.0
"""Seconds between two states of a notebook's line."""

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


class SafeConsole(Console):
    """A console that prints strings literally. Only `Text` adds colours.

    On a terminal, lines of text break between words. Elsewhere each text stays on its line.
    """

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

    def print(self, *objects: Any, **options: Any) -> None:
        """Print objects; `soft_wrap=True` leaves the lines of a text to the terminal, as of a command to copy."""
        if self.is_terminal and "soft_wrap" not in options:
            objects = tuple(break_lines(each, self.width) if isinstance(each, str | Text) else each for each in objects)
        super().print(*objects, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Print segments with control characters escaped."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible(segment.text), segment.style)


def break_lines(text: str | Text, width: int) -> Text:
    """Return a text with lines of at most `width` columns, broken between words; longer words stay whole.

    Further lines have the indentation of the first one.
    """
    lines = (text if isinstance(text, Text) else Text(text)).split("\n", allow_blank=True)
    return Text("\n").join(part for line in lines for part in _break_line(line, width))


def _break_line(line: Text, width: int) -> Iterator[Text]:
    indent = len(line.plain) - len(line.plain.lstrip())
    breaks, used = [], 0
    for word in _WORD.finditer(line.plain):
        size = cell_len(word[0])
        if used > indent and used + cell_len(word[0].rstrip()) > width:
            breaks.append(word.start())
            used = indent
        used += size
    for number, part in enumerate(line.divide(breaks)):
        part.rstrip()
        yield part if number == 0 else Text(" " * indent) + part


def describe_stage(title: str, label: str) -> str:
    """Return the title of the work with its current stage."""
    return f"{title}: {label}" if label else title


@contextmanager
def progress_bar(title: str, console: Console) -> Iterator[Progress]:
    """Show a bar with its label and the elapsed time on a terminal; yield the function to advance it."""
    from rich.progress import BarColumn, ProgressColumn, TextColumn
    from rich.progress import Progress as Bar

    class Percentage(ProgressColumn):
        """The share of the work; empty for a stage without a known amount."""

        def render(self, task: Any) -> Text:
            return Text("" if task.total is None else f"{task.percentage:>3.0f} %")

    class Elapsed(ProgressColumn):
        """The time since the start of the command; rich's stops when a stage is complete."""

        def render(self, task: Any) -> Text:
            return Text(format_clock(task.elapsed or 0), style="progress.elapsed")

    def describe(label: str) -> str:
        stage = describe_stage(title, label)
        return stage if len(stage) <= console.width - _FIGURES else label

    is_narrow = console.width < _NARROW
    columns = (TextColumn("{task.description}", markup=False), *(() if is_narrow else (BarColumn(),)), Percentage())
    columns = (*columns, Elapsed(), time_left_column())
    with Bar(*columns, console=console, transient=True, speed_estimate_period=_DAY) as bar:
        number = bar.add_task(title, total=None)
        (task,) = bar.tasks

        def advance(label: str, done: int, total: int) -> None:
            task.finished_time = None
            if has_no_amount(done, total):
                task.total = None
                bar.update(number, completed=0, description=describe(label))
            else:
                bar.update(number, completed=done, total=total, description=describe(label))

        yield advance


def format_clock(seconds: float) -> str:
    """Format a duration as minutes and seconds."""
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}:{rest:02}"


def has_no_amount(done: int, total: int) -> bool:
    """Return whether a stage is reported only at its beginning."""
    return done == 0 and total == 1


def time_left_column() -> Any:
    """Return the column of a bar's time left; it is empty if the label contains another estimate."""
    from rich.progress import TimeRemainingColumn

    class TimeLeft(TimeRemainingColumn):
        def render(self, task: Any) -> Text:
            if _TIME_LEFT.search(task.description) or not task.time_remaining:
                return Text()
            return super().render(task).append(" left")

    return TimeLeft()


@contextmanager
def _notebook_line(title: str) -> Iterator[Progress]:
    """Show one line with the stage, its share and the elapsed time in a notebook."""
    line, started, is_over, state = LiveLine(), time.monotonic(), threading.Event(), [title, ""]

    def show() -> None:
        line.show(f"{state[0]}{state[1]}   {format_clock(time.monotonic() - started)}")

    def advance(label: str, done: int, total: int) -> None:
        share = "" if has_no_amount(done, total) else f"   {100 * done // max(total, 1)} %"
        state[:] = describe_stage(title, label), share

    def refresh() -> None:
        while not is_over.wait(_REFRESH):
            show()

    show()
    threading.Thread(target=refresh, daemon=True).start()
    try:
        yield advance
    finally:
        is_over.set()
        line.show("")


def shows_progress(title: str) -> Callable[[Callable[_Parameters, _Result]], Callable[_Parameters, _Result]]:
    """Show progress in a terminal or a notebook if a function is called without its keyword argument `progress`.

    Nothing is shown elsewhere, and of several processes only the first one shows it.
    """

    def decorate(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
        @functools.wraps(function)
        def showing(*args: Any, progress: Progress | None = None, **keywords: Any) -> _Result:
            call = cast("Callable[..., _Result]", function)
            if progress is not None or rank() != 0:
                return call(*args, progress=progress, **keywords)
            if is_notebook():
                shown = _notebook_line(title)
            elif sys.stderr.isatty():
                shown = progress_bar(title, SafeConsole(stderr=True))
            else:
                return call(*args, progress=None, **keywords)
            with shown as progress:
                return call(*args, progress=progress, **keywords)

        return cast("Callable[_Parameters, _Result]", showing)

    return decorate
