"""Methods and recipes: pure functions from one configuration to another."""

from typing import TYPE_CHECKING

from ctxext.lazy import hand_on

if TYPE_CHECKING:
    from ctxext.recipes.base import Method as Method
    from ctxext.recipes.methods.abf import AdjustedBase as AdjustedBase
    from ctxext.recipes.methods.dynamic import DynamicNtk as DynamicNtk
    from ctxext.recipes.methods.llama3 import Llama3 as Llama3
    from ctxext.recipes.methods.longrope import LongRope as LongRope
    from ctxext.recipes.methods.mspoe import MsPoE as MsPoE
    from ctxext.recipes.methods.ntk import Ntk as Ntk
    from ctxext.recipes.methods.ntk_by_parts import NtkByParts as NtkByParts
    from ctxext.recipes.methods.pi import PositionInterpolation as PositionInterpolation
    from ctxext.recipes.methods.yarn import Yarn as Yarn
    from ctxext.recipes.recipe import Recipe as Recipe
    from ctxext.recipes.recipe import load_recipe as load_recipe
    from ctxext.recipes.registry import METHODS as METHODS
    from ctxext.recipes.registry import method_named as method_named

__all__ = hand_on(__name__)
