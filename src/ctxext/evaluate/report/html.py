"""Tables and cells of the page; every text that comes from outside is escaped here or by its caller."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from ctxext.evaluate.report.colours import hexadecimal, ink, shade
from ctxext.evaluate.report.findings import percent


def table(head: Sequence[str], rows: Iterable[Sequence[Any]], text: Sequence[int] = (), kind: str = "") -> str:
    """A table in a box that scrolls by itself; cells are markup already.

    Args:
        head: Of the columns; none for a table without.
        rows: Cells.
        text: Numbers of the columns that hold words.
        kind: Its class.
    """

    def line(cells: Sequence[Any], tag: str) -> str:
        marks = [' class="text"' if number in text else "" for number in range(len(cells))]
        return "".join(f"<{tag}{mark}>{cell}</{tag}>" for mark, cell in zip(marks, cells, strict=True))

    heading = f"<thead><tr>{line(head, 'th')}</tr></thead>" if head else ""
    body = "".join(f"<tr>{line(row, 'td')}</tr>" for row in rows)
    mark = f' class="{kind}"' if kind else ""
    return f'<div class="wide"><table{mark}>{heading}<tbody>{body}</tbody></table></div>'


def model_name(name: str, short: Mapping[str, str]) -> str:
    """A short name, with the whole one below it where they differ."""
    whole = f'<br><span class="soft whole">{escape(name)}</span>' if short[name] != name else ""
    return f"{escape(short[name])}{whole}"


def share_cell(share: float, *, tag: str = "td") -> str:
    """A share as a coloured cell with its figure."""
    colour = shade(share)
    style = f"background:{hexadecimal(colour)};color:{ink(colour)}"
    return f'<{tag} class="cell" style="{style}">{percent(share)}</{tag}>'
