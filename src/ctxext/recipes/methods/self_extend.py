"""Self-Extend: exact distances for near keys, grouped distances for far ones."""

from typing import Any

from typing_extensions import override

from ctxext.recipes.code.method import PORTABLE
from ctxext.recipes.methods.relation import Relation, require, window_problem
from ctxext.recipes.param import param


class SelfExtend(Relation):
    """Keep near tokens at their exact distance and group far positions to fit the original length. No training.

    Beyond the window w, keys have the position floor(n / G) and queries floor(m / G) + w - w / G. G is the smallest
    group that fits all tokens up to the query, so inputs within L give bit-identical output. Use it for long inputs if
    short ones must not lose quality. Jin et al. 2024, section 3.2, with a group per query position.
    """

    name = "self-extend"
    title = "Self-Extend"
    paper = "https://arxiv.org/abs/2401.01325"
    code = (PORTABLE / "self_extend.py", *Relation.code)
    code_class = "SelfExtend"

    window: int | None = param(
        None,
        help="Distances up to this stay exact (w). Default: an eighth of L.",
        min=1,
        search=(16, 512),
    )
    group: int | None = param(
        None, help="Number of far positions merged into one (G). Default: chosen for each query position.", min=1
    )

    @override
    def defaults(self, length: int) -> dict[str, Any]:
        return {"window": max(length // 8, 1)}

    @override
    def problem(self, length: int, target: int) -> tuple[str, str] | None:
        # With a window w, a fixed group G extends the context to w + (L - w) · G.
        window = require(self.window)
        if problem := window_problem(window, length):
            return problem
        if self.group is not None and window + (length - window) * self.group < target:
            needed = -(-(target - window) // (length - window))
            longest = window + (length - window) * self.group
            return f"a window of {window} and a group of {self.group} reach {longest} tokens, not {target}.", (
                f"--group {needed}, or omit it to use the smallest group for each row."
            )
        return None
