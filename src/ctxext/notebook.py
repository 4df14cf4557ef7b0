"""Display of results in a notebook."""

import html
from collections.abc import Mapping
from typing import Any


def table(rows: Mapping[Any, object]) -> str:
    """Format a table of two columns as HTML, with everything escaped because names may be untrusted."""
    cells = (
        f"<tr><th>{html.escape(str(key))}</th><td>{html.escape(str(value))}</td></tr>" for key, value in rows.items()
    )
    return f"<table>{''.join(cells)}</table>"
