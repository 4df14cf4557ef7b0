"""All printing: results on stdout, everything else on stderr, in human, JSON and quiet form.

Text is safe for a terminal: no markup, no control characters, and errors on one line. The streams redact secrets.
"""

import dataclasses
import json
import logging
import shlex
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.highlighter import NullHighlighter
from rich.text import Text

from ctxext.console import SafeConsole, describe_stage, format_clock, has_no_amount, progress_bar
from ctxext.errors import CtxextError
from ctxext.files.content import Progress
from ctxext.options import option
from ctxext.redaction import SECRET_FLAGS, escape_json, shorten

if TYPE_CHECKING:
    from rich.table import Table

_LONGEST = 2000
"""Maximum number of displayed characters of an error; a configuration may contain a word of any length."""


def in_one_line(text: str) -> str:
    """Return a message on one line, cut to a readable length."""
    return shorten(text, _LONGEST)


def bold(text: Any) -> Text:
    """Return a bold text, for headings and names."""
    return Text(str(text), style="bold")


def done_line(name: Any, rest: str) -> Text:
    """Return the line that reports a written file or folder."""
    return Text.assemble(("✓", "green"), " ", (str(name), "bold"), f"   {rest}")


def label_table() -> "Table":
    """Return a table of labels and values, which are never cut."""
    from rich.table import Column, Table

    return Table.grid(Column(no_wrap=True), Column(overflow="fold"), padding=(0, 2))


def mark_line(mark: str, colour: str, rest: str) -> Text:
    """Return a line that begins with a coloured mark."""
    return Text.assemble((mark, colour), f" {rest}")


def format_relative(difference: float) -> str:
    """Format a relative difference."""
    return f"relative difference {difference:.0e}" if difference else "identical"


NOT_WRITTEN = "OUT was not written."
"""The state after Ctrl-C of commands that write their output at the end."""

REPORTING = "Output"
"""The panel of these options, the last of each help."""


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
        self._shown = ExitStack()
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
        self.stderr.print(Text.assemble(("warning: ", "yellow bold"), text))

    def next_step(self, *words: object, why: str = "Next") -> None:
        """Suggest the next command, given as words, quoted for a shell."""
        if not self.quiet:
            self.stderr.print(Text.assemble((f"{why}: ", "dim"), (shlex.join(map(str, words)), "cyan")), soft_wrap=True)

    @contextmanager
    def progress(self, title: str, stopped: str | None = None) -> Iterator[Progress]:
        """Show progress; yield the function to advance it.

        A terminal shows a bar, a log occasional lines, and quiet mode nothing.

        Args:
            title: The work, as "converting".
            stopped: The state of the output after Ctrl-C, printed with the stage; None prints nothing.
        """
        started, stage = time.monotonic(), title

        def advance(label: str, done: int, total: int) -> None:
            nonlocal stage
            stage = describe_stage(title, label)
            show(label, done, total)

        with ExitStack() as self._shown:
            show = self._shown.enter_context(self._show_progress(title))
            try:
                yield advance
            except KeyboardInterrupt:
                self.end_progress()
                if stopped is not None:
                    self.note(f"Stopped after {format_clock(time.monotonic() - started)} ({stage}). {stopped}".strip())
                raise

    def end_progress(self) -> None:
        """Remove the bar, before a message that ends the process."""
        self._shown.close()

    @contextmanager
    def _show_progress(self, title: str) -> Iterator[Progress]:
        if self.quiet:
            yield lambda label, done, total: None
        elif self.stderr.is_terminal:
            with progress_bar(title, self.stderr) as advance:
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
                share = "" if has_no_amount(done, total) else f" {10 * tenth} %"
                self.stderr.print(describe_stage(title, label) + share)

        return advance


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
    console.print(Text.assemble(("error: ", "red bold"), in_one_line(error.message)))
    if error.hint:
        console.print(Text.assemble(("hint:  ", "cyan"), in_one_line(error.hint)))


def same_command(*more: object, without: Collection[str] = ()) -> list[str]:
    """Return the words of the current command without secrets, then those of `more`, each flag only once.

    Args:
        more: Flags, and their values.
        without: Flags of options to omit with their values.
    """
    words = [Path(sys.argv[0]).name, *sys.argv[1:]]
    if words[0] in ("__main__.py", "-m", "-c"):
        words[0] = "ctxext"
    pairs, omitted, new = pairwise(["", *words]), {*SECRET_FLAGS, *without}, [str(word) for word in more]
    words = [word for before, word in pairs if not {before, word.partition("=")[0]} & omitted]
    return [*(word for word in words if not (word in new and word.startswith("-"))), *new]


def resuming_command(*more: str) -> list[str]:
    """Return the typed command with --resume, and without --overwrite, which would delete the results."""
    return [word for word in same_command(*more, "--resume") if word != "--overwrite"]
