"""Bifocal attention as in Jet-Long."""

from typing import Any

from typing_extensions import override

from ctxext.recipes.code.method import PORTABLE
from ctxext.recipes.methods.relation import Relation, require, window_problem
from ctxext.recipes.param import param


class Bifocal(Relation):
    """Keep near tokens at their exact distance and divide far positions by a group per query. No training.

    Beyond the window w, keys have the position floor(n / G) and queries floor(m / G) + w - w / G. G is the smallest
    group that fits all tokens up to the query. The paper has no w - w / G, so its distances jump at the window. Use it
    like self-extend, with a smaller window. Jet-Long 2026, section 3.
    """

    name = "bifocal"
    title = "Bifocal attention (Jet-Long)"
    paper = "https://arxiv.org/abs/2607.07740"
    code = (PORTABLE / "bifocal.py", *Relation.code)
    code_class = "Bifocal"
    is_experimental = True

    window: int | None = param(
        None, help="Distances up to this stay exact. Default: a sixteenth of L.", min=1, search=(16, 512)
    )

    @override
    def defaults(self, length: int) -> dict[str, Any]:
        # The paper's window is a sixteenth of L.
        return {"window": max(length // 16, 1)}

    @override
    def problem(self, length: int, target: int) -> tuple[str, str] | None:
        return window_problem(require(self.window), length)
