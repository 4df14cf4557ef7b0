"""A sliding window: the most recent tokens only."""

from typing import Any

from typing_extensions import override

from ctxext.recipes.code.method import PORTABLE
from ctxext.recipes.methods.relation import Relation, require
from ctxext.recipes.param import param


class Window(Relation):
    """Attend to the most recent tokens only: a sliding window. A baseline for comparisons.

    Beltagy et al. 2020, section 3.1, on a model that was not trained with it.
    """

    name = "window"
    title = "Sliding window"
    paper = "https://arxiv.org/abs/2004.05150"
    code = (PORTABLE / "window.py", PORTABLE / "sinks.py", *Relation.code)
    code_class = "Window"
    is_experimental = True
    caution = "tokens before the window are not read, and many models fail without the first tokens."

    window: int | None = param(None, help="Number of recent tokens that are attended to. Default: L.", min=1)

    @override
    def defaults(self, length: int) -> dict[str, Any]:
        return {"window": length}

    @override
    def problem(self, length: int, target: int) -> tuple[str, str] | None:
        if require(self.window) > length:
            return f"a window of {self.window} exceeds the context length of {length} tokens.", f"--window {length}"
        return None
