"""Methods and recipes: pure functions from one configuration to another."""

from typing import TYPE_CHECKING

from ctxext.lazy import hand_on

if TYPE_CHECKING:
    from ctxext.recipes.base import Method
    from ctxext.recipes.methods.abf import AdjustedBase
    from ctxext.recipes.methods.dynamic import DynamicNtk
    from ctxext.recipes.methods.llama3 import Llama3
    from ctxext.recipes.methods.longrope import LongRope
    from ctxext.recipes.methods.mspoe import MsPoE
    from ctxext.recipes.methods.ntk import Ntk
    from ctxext.recipes.methods.ntk_by_parts import NtkByParts
    from ctxext.recipes.methods.pi import PositionInterpolation
    from ctxext.recipes.methods.yarn import Yarn
    from ctxext.recipes.recipe import Recipe, load_recipe
    from ctxext.recipes.registry import METHODS, method_named

__all__ = [
    "METHODS",
    "AdjustedBase",
    "DynamicNtk",
    "Llama3",
    "LongRope",
    "Method",
    "MsPoE",
    "Ntk",
    "NtkByParts",
    "PositionInterpolation",
    "Recipe",
    "Yarn",
    "load_recipe",
    "method_named",
]

_NAMES = {
    "Method": "ctxext.recipes.base",
    "AdjustedBase": "ctxext.recipes.methods.abf",
    "DynamicNtk": "ctxext.recipes.methods.dynamic",
    "Llama3": "ctxext.recipes.methods.llama3",
    "LongRope": "ctxext.recipes.methods.longrope",
    "MsPoE": "ctxext.recipes.methods.mspoe",
    "Ntk": "ctxext.recipes.methods.ntk",
    "NtkByParts": "ctxext.recipes.methods.ntk_by_parts",
    "PositionInterpolation": "ctxext.recipes.methods.pi",
    "Yarn": "ctxext.recipes.methods.yarn",
    "Recipe": "ctxext.recipes.recipe",
    "load_recipe": "ctxext.recipes.recipe",
    "METHODS": "ctxext.recipes.registry",
    "method_named": "ctxext.recipes.registry",
}
hand_on(__name__, _NAMES)
