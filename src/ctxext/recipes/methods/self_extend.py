"""Self-Extend: near keys at their own distance, far ones in groups."""

from dataclasses import dataclass
from typing import Any

from ctxext.recipes.code.method import PORTABLE
from ctxext.recipes.methods.relation import Relation, given, window_problem
from ctxext.recipes.param import param


@dataclass(frozen=True, kw_only=True)
class SelfExtend(Relation):
    """Keep near keys at their own distance and group the positions of far ones; both meet at the border. No training.

    Far keys stand at floor(n / G), queries at floor(m / G) + w - w / G, in one softmax; G is the smallest that the
    row's own length needs. Jin et al. 2024, section 3.2, with the group chosen by the row.
    """

    name = "self-extend"
    title = "Self-Extend"
    paper = "https://arxiv.org/abs/2401.01325"
    code = (PORTABLE / "self_extend.py", *Relation.code)
    code_class = "SelfExtend"

    window: int | None = param(
        None,
        help="Tokens within which distances stay exact, w; an eighth of L where not given.",
        min=1,
        search=(16, 512),
    )
    group: int | None = param(
        None, help="A fixed number of far positions that share one, G, in the place of the row's own.", min=1
    )

    def defaults(self, length: int) -> dict[str, Any]:
        """An eighth of L."""
        return {"window": max(length // 8, 1)}

    def problem(self, length: int, target: int) -> tuple[str, str] | None:
        """A fixed group reaches w + (L - w) · G."""
        window = given(self.window)
        if found := window_problem(window, length):
            return found
        if self.group is not None and window + (length - window) * self.group < target:
            needed = -(-(target - window) // (length - window))
            reach = window + (length - window) * self.group
            return f"a window of {window} and a group of {self.group} reach {reach} tokens, not {target}.", (
                f"--group {needed}, or leave it out: every row then takes the smallest that it needs."
            )
        return None
