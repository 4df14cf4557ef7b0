"""ReRoPE: all far keys at one distance."""

from dataclasses import dataclass
from typing import Any

from ctxext.recipes.code.method import PORTABLE
from ctxext.recipes.methods.relation import Relation, given, window_problem
from ctxext.recipes.param import param


@dataclass(frozen=True, kw_only=True)
class ReRope(Relation):
    """Show all far keys at one distance, that of the window's edge. No training.

    Rows inside L stay as they were. Su 2023, "ReRoPE".
    """

    name = "rerope"
    title = "ReRoPE"
    paper = "https://kexue.fm/archives/9708"
    code = (PORTABLE / "rerope.py", *Relation.code)
    code_class = "Rerope"

    window: int | None = param(
        None,
        help="Tokens within which distances stay exact, w; a quarter of L where not given.",
        min=1,
        search=(16, 512),
    )

    def defaults(self, length: int) -> dict[str, Any]:
        """A quarter of L."""
        return {"window": max(length // 4, 1)}

    def problem(self, length: int, target: int) -> tuple[str, str] | None:
        """The window must leave something to regroup."""
        return window_problem(given(self.window), length)
