"""A sliding window: the most recent tokens only."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar
from typing_extensions import Self
from ctxext.errors import CtxextError
from ctxext.checkpoint.families import Family, rotated_layers
from ctxext.recipes.base import Kind
from ctxext.recipes.code.method import PORTABLE, CodeMethod
from ctxext.recipes.encodings.base import Encoding
from ctxext.recipes.param import SearchRange, param
from ctxext.recipes.encodings.rotary import Config, ModelConfig, Rotary
from ctxext.recipes.methods.relation import Relation, given


@dataclass(frozen=True, kw_only=True)
class Window(Relation):
    """Read the most recent tokens only. The approximate attention that every comparison needs. A baseline.

    Beltagy et al. 2020, section 3.1, on a model that was not trained for it.
    """

    name = "window"
    title = "Sliding window"
    paper = "https://arxiv.org/abs/2004.05150"
    code_class = "Window"
    is_experimental = True
    caution = "what lies before the window is not read at all, and without the first tokens many models break."

    window: int | None = param(None, help="How many recent tokens are read; L where not given.", min=1)

    def defaults(self, length: int) -> dict[str, Any]:
        """All of L."""
        return {"window": length}

    def problem(self, length: int, target: int) -> tuple[str, str] | None:
        """What is read at once must fit into L."""
        if given(self.window) > length:
            return f"a window of {self.window} is more than the {length} tokens that it reads.", f"--window {length}"
        return None
