"""Dynamic NTK scaling, as transformers runs it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ctxext.recipes.base import Scaling
from ctxext.recipes.encodings.base import Encoding
from ctxext.recipes.encodings.rotary import Rotary


@dataclass(frozen=True, kw_only=True)
class DynamicNtk(Scaling):
    """Raise the base only as far as the current length needs, so that short inputs stay as they were.

    NTK-aware scaling with the factor of the current length. emozilla, July 2023.
    """

    name = "dynamic"
    title = "Dynamic NTK"
    paper = "https://arxiv.org/abs/2309.00071"
    rope_type = "dynamic"
    caution = (
        "transformers picks one frequency set for a whole batch from its longest row, and keys cached before the "
        "original context length was crossed keep their old rotation: run one prompt at a time, whole; engines differ. "
        "adaptive does by the row what this means to do, and agrees with its cache."
    )

    def reach(self, encoding: Encoding) -> int:
        """The trained length: transformers takes the maximum for it, and raising that switches the scaling off.

        See docs/traps.md, trap 5.
        """
        return encoding.trained_length

    def schedule(self, rotary: Rotary) -> Mapping[str, Any]:
        """The `dynamic` type of transformers."""
        return {"factor": self.stretch}
