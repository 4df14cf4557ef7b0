"""Methods and recipes: pure functions from one configuration to another."""

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
