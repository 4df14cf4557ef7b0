"""Safe text for a terminal: no markup, no control characters, no token, and errors on one line."""

import re
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from ctxext.files.tokens import redacted

# Control characters, and those that turn the direction of reading around; surrogates cannot be written at all.
_UNSEEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_LONGEST = 2000
"""Characters of an error that are shown; a configuration may hold a word of any length."""


class SafeConsole(Console):
    """A console to which a string is only a string; colours come from `Text` alone."""

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, highlight=False, soft_wrap=True, markup=False, emoji=False)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Print segments with control characters escaped."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible(segment.text), segment.style)


def visible(text: str) -> str:
    """A text with control characters escaped as in Python, and without tokens."""
    return redacted(_UNSEEN.sub(lambda match: _written(match[0]), text))


def _written(character: str) -> str:
    return f"\\u{ord(character):04x}" if ord(character) > 0xFF else f"\\x{ord(character):02x}"


def in_one_line(text: str, longest: int = _LONGEST) -> str:
    """A message on one line, cut if it is very long; tokens are removed before the cut."""
    line = " ".join(redacted(text).split())
    return line if len(line) <= longest else f"{line[:longest]}…"


def bold(text: Any) -> Text:
    """A heading, a name."""
    return Text(str(text), style="bold")


def done_line(name: Any, rest: str) -> Text:
    """The line that reports a written file or folder."""
    return Text.assemble(("✓", "green"), " ", (str(name), "bold"), f"   {rest}")


def marked(mark: str, colour: str, rest: str) -> Text:
    """A line behind a coloured mark."""
    return Text.assemble((mark, colour), f" {rest}")
