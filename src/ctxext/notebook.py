"""Display in a notebook."""

import html
import importlib
import sys
from collections.abc import Mapping
from typing import Any


def table(rows: Mapping[Any, object]) -> str:
    """Format a table of two columns as HTML, with everything escaped because names may be untrusted."""
    cells = (
        f"<tr><th>{html.escape(str(key))}</th><td>{html.escape(str(value))}</td></tr>" for key, value in rows.items()
    )
    return f"<table>{''.join(cells)}</table>"


def is_notebook() -> bool:
    """Return whether the code runs in a notebook: Jupyter, Colab and others with IPython's kernel."""
    module = sys.modules.get("IPython")
    shell = module.get_ipython() if module is not None and hasattr(module, "get_ipython") else None
    return getattr(shell, "kernel", None) is not None


class LiveLine:
    """A line below a notebook's cell, which is replaced each time."""

    def __init__(self) -> None:
        display: Any = importlib.import_module("IPython.display").display
        self._handle = display({"text/plain": ""}, raw=True, display_id=True)

    def show(self, text: str) -> None:
        """Replace the line; an empty text removes it."""
        formatted = f"<code>{html.escape(text)}</code>" if text else ""
        self._handle.update({"text/plain": text, "text/html": formatted}, raw=True)
