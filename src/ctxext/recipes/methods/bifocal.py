"""Bifocal attention as Jet-Long has it, and groups per rotated pair as DPE has them."""

from typing import Any

from ctxext.errors import CtxextError
from ctxext.recipes.code.method import PORTABLE
from ctxext.recipes.encodings.rotary import ModelConfig
from ctxext.recipes.methods.relation import Relation, given, window_problem
from ctxext.recipes.param import param


class Bifocal(Relation):
    """Keep near tokens at their exact distance and divide far positions by a group for each row. No training.

    Beyond the window, positions are floor(m / G) and floor(n / G) with G = ceil((m + 1) / L): as published distances
    jump at the border, by default they continue there as in self-extend. Use it like self-extend, with a smaller
    window; --groups gives every rotated pair a group of its own (DPE, arXiv 2504.18857). Jet-Long 2026, section 3.
    """

    name = "bifocal"
    title = "Bifocal attention (Jet-Long)"
    paper = "https://arxiv.org/abs/2607.07740"
    code = (PORTABLE / "bifocal.py", *Relation.code)
    code_class = "Bifocal"

    window: int | None = param(
        None, help="Distances up to this stay exact. Default: a sixteenth of L.", min=1, search=(16, 512)
    )
    border: str = param(
        "continuous",
        help="Distances beyond the window continue from there (as in Self-Extend), or jump as published.",
        choices=("continuous", "published"),
        search=("continuous", "published"),
    )
    groups: tuple[float, ...] | None = param(
        None, help="Groups, one per rotated pair: a file with a list of whole numbers."
    )

    def summary(self) -> str:
        """The step with how far it reaches, and its border if that is the published one."""
        return super().summary() + (", border as published" if self.border == "published" else "")

    def defaults(self, length: int) -> dict[str, Any]:
        """A sixteenth of L, the proportion of the paper."""
        return {"window": max(length // 16, 1)}

    def problem(self, length: int, target: int) -> tuple[str, str] | None:
        """The window must leave something to regroup, and groups must be whole."""
        if self.groups and any(group < 1 or group != int(group) for group in self.groups):
            return "groups must be whole numbers of at least 1.", "Jet-Long's rule needs no --groups."
        return window_problem(given(self.window), length)

    def settings(self, model: ModelConfig) -> dict[str, Any]:
        """The numbers of the map, with groups as whole numbers."""
        settings = super().settings(model)
        if self.groups:
            pairs = model.rotary.dim // 2
            if len(self.groups) != pairs:
                raise CtxextError(
                    f"bifocal: groups has {len(self.groups)} numbers, but this model rotates {pairs} pairs."
                )
            settings["groups"] = [int(group) for group in self.groups]
        return settings
