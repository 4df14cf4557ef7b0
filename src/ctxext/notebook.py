"""How results look in a notebook."""

import html
from collections.abc import Mapping
from typing import Any


def table(rows: Mapping[Any, object]) -> str:
    """A table of two columns with everything escaped: a name may be a stranger's."""
    cells = (
        f"<tr><th>{html.escape(str(key))}</th><td>{html.escape(str(value))}</td></tr>" for key, value in rows.items()
    )
    return f"<table>{''.join(cells)}</table>"
