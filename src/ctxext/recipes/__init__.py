"""Methods and recipes: pure functions from one configuration to another."""

from ctxext.recipes.abf import AdjustedBase
from ctxext.recipes.base import Method
from ctxext.recipes.dynamic import DynamicNtk
from ctxext.recipes.llama3 import Llama3
from ctxext.recipes.longrope import LongRope
from ctxext.recipes.methods import METHODS, method_named
from ctxext.recipes.mspoe import MsPoE
from ctxext.recipes.ntk import Ntk
from ctxext.recipes.pi import PositionInterpolation
from ctxext.recipes.recipe import Recipe, load_recipe
from ctxext.recipes.yarn import NtkByParts, Yarn

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
