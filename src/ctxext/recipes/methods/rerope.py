"""ReRoPE: all far keys at one distance."""

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
from ctxext.recipes.methods.relation import Relation, window_problem, given


@dataclass(frozen=True, kw_only=True)
class ReRope(Relation):
    """Show all far keys at one distance, that of the window's edge. No training.

    Rows inside L stay as they were. Su 2023, "ReRoPE".
    """

    name = "rerope"
    title = "ReRoPE"
    paper = "https://kexue.fm/archives/9708"
    code_class = "Rerope"

    window: int | None = param(
        None,
        help="Tokens within which distances stay exact, w; a quarter of L where not given.",
        min=1,
        search=(16, 512),
    )

    def defaults(self, length: int) -> dict[str, Any]:
        """A quarter of L."""
        return {"window": max(length // 4, 1)}

    def problem(self, length: int, target: int) -> tuple[str, str] | None:
        """The window must leave something to regroup."""
        return window_problem(given(self.window), length)
