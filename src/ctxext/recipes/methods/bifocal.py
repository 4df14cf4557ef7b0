"""Bifocal attention as in Jet-Long, and groups per rotated pair as in DPE."""

from typing import Any

from ctxext.errors import CtxextError
from ctxext.recipes.code.method import PORTABLE
from ctxext.recipes.encodings.rotary import ModelConfig
from ctxext.recipes.methods.relation import Relation, require, window_problem
from ctxext.recipes.param import param


class Bifocal(Relation):
    """Keep near tokens at their exact distance and divide far positions by a group per query. No training.

    Beyond the window, positions are floor(m / G) and floor(n / G) with G = ceil((m + 1) / L). By default distances
    continue at the border as in self-extend; the published ones jump. Use it like self-extend, with a smaller window.
    --groups sets a group per rotated pair (DPE, arXiv 2504.18857). Jet-Long 2026, section 3.
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
        None, help="File with a list of whole numbers, one group per rotated pair."
    )

    def summary(self) -> str:
        """Return the step in a few words, for one line of output.

        Contains the factor or the target length, and the border if it is the published one.
        """
        return super().summary() + (", border as published" if self.border == "published" else "")

    def defaults(self, length: int) -> dict[str, Any]:
        """Return the defaults that depend on L, by option.

        The window is a sixteenth of L, the proportion of the paper.
        """
        return {"window": max(length // 16, 1)}

    def problem(self, length: int, target: int) -> tuple[str, str] | None:
        """Return an error and a hint if the options cannot extend L to the target; None if they can.

        The window must leave something to regroup, and groups must be whole numbers.
        """
        if self.groups and any(group < 1 or group != int(group) for group in self.groups):
            return "groups must be whole numbers of at least 1.", "Jet-Long's rule needs no --groups."
        return window_problem(require(self.window), length)

    def settings(self, model: ModelConfig) -> dict[str, Any]:
        """Return the parameters that the portable class reads, as plain JSON.

        They are the parameters of the map, with groups as whole numbers.
        """
        settings = super().settings(model)
        if self.groups:
            pairs = model.rotary.dim // 2
            if len(self.groups) != pairs:
                raise CtxextError(
                    f"bifocal: groups has {len(self.groups)} numbers, but this model rotates {pairs} pairs."
                )
            settings["groups"] = [int(group) for group in self.groups]
        return settings
