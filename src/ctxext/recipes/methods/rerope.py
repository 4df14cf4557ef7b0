"""ReRoPE: all far keys at one distance."""

from typing import Any

from typing_extensions import override

from ctxext.recipes.code.method import PORTABLE
from ctxext.recipes.methods.relation import Relation, require, window_problem
from ctxext.recipes.param import param


class ReRope(Relation):
    """Keep distances within a window exact, and give all farther tokens the distance of its edge. No training.

    Inputs within L stay unchanged; the order of far tokens is lost. Su 2023, "ReRoPE".
    """

    name = "rerope"
    title = "ReRoPE"
    paper = "https://kexue.fm/archives/9708"
    code = (PORTABLE / "rerope.py", *Relation.code)
    code_class = "Rerope"
    is_experimental = True

    window: int | None = param(
        None,
        help="Distances up to this stay exact (w). Default: a quarter of L.",
        min=1,
        search=(16, 512),
    )

    @override
    def defaults(self, length: int) -> dict[str, Any]:
        return {"window": max(length // 4, 1)}

    @override
    def problem(self, length: int, target: int) -> tuple[str, str] | None:
        return window_problem(require(self.window), length)
