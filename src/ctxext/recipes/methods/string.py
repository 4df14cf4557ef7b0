"""STRING: shorter, well-trained distances replace rarely trained far ones."""

from collections.abc import Mapping
from typing import Any, ClassVar

from ctxext.recipes.code.method import PORTABLE
from ctxext.recipes.methods.relation import Relation, require
from ctxext.recipes.param import param


class String(Relation):
    """Shift far distances down to well-trained ones. Uses the existing context better; hardly extends it.

    Distances d beyond S become d - S + w, for query positions beyond L or from --start on. Use it on models with rarely
    trained long distances. An et al. 2024, section 4.
    """

    name = "string"
    title = "STRING"
    paper = "https://arxiv.org/abs/2410.18745"
    code = (PORTABLE / "string.py", *Relation.code)
    code_class = "String"
    is_experimental = True
    example: ClassVar[Mapping[str, Any]] = {"factor": 1.2}  # It does not support larger factors.

    shift: int | None = param(None, help="Distances up to this stay exact (S). Default: a third of L.", min=1)
    window: int | None = param(
        None, help="Start of the shifted distances (w). Default: an eighth of L, at most 128.", min=0
    )
    start: int | None = param(None, help="First query position with shifted distances. Default: L.", min=0)

    def defaults(self, length: int) -> dict[str, Any]:
        """Return the defaults that depend on L, by option.

        The proportions are those of the paper.
        """
        shift = self.shift or max(length // 3, 1)
        return {"shift": shift, "window": min(length // 8, 128, shift), "start": length}

    def problem(self, length: int, target: int) -> tuple[str, str] | None:
        """Return an error and a hint if the options cannot extend L to the target; None if they can.

        Distances up to L extend the context to L + S - w tokens.
        """
        shift, window = require(self.shift), require(self.window)
        if window > shift:
            return f'window "{window}" is above shift "{shift}".', f"--window {shift // 3}"
        if target > length + shift - window:
            longest = length + shift - window
            return f"a shift of {shift} reaches {longest} tokens, not {target}.", f"--target-length {longest}"
        return None
