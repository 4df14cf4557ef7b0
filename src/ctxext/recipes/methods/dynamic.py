"""Dynamic NTK scaling, as in transformers."""

from collections.abc import Mapping
from typing import Any

from typing_extensions import override

from ctxext.recipes.base import Scaling
from ctxext.recipes.encodings.base import Encoding
from ctxext.recipes.encodings.rotary import Rotary


class DynamicNtk(Scaling):
    """Raise the RoPE base with the length of the input, so that short inputs stay unchanged.

    NTK-aware scaling with the factor that the current length needs. Use it for single prompts without batching;
    otherwise prefer adaptive. emozilla, July 2023.
    """

    name = "dynamic"
    title = "Dynamic NTK"
    paper = "https://arxiv.org/abs/2309.00071"
    rope_type = "dynamic"
    caution = (
        "transformers selects one set of frequencies for a batch by its longest sequence, and keys cached within the "
        "original context length keep their rotation: run whole prompts, one at a time; engines differ. adaptive does "
        "the same per query position and is consistent with its cache."
    )

    @override
    def length_after(self, encoding: Encoding) -> int:
        # transformers reads the trained length from max_position_embeddings, and raising it disables the scaling
        # (docs/traps.md, trap 5).
        return encoding.trained_length

    @override
    def schedule(self, rotary: Rotary) -> Mapping[str, Any]:
        return {"factor": self.scaling_factor}
