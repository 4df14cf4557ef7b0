"""ctxext: make a language model read more.

>>> from ctxext import Recipe, Yarn
>>> Recipe(Yarn(factor=4)).summary()
'yarn ×4'

Everything is imported when it is first used. `compare`, `evaluate`, `finetune`, `search` and `verify` are packages that
are called like the functions of their names, so `ctxext.evaluate(...)` and `from ctxext.evaluate import Settings` both
work, whichever comes first.
"""

from typing import TYPE_CHECKING

from ctxext.lazy import hand_on
from ctxext.version import __version__

if TYPE_CHECKING:
    from ctxext.checkpoint.opening import open_checkpoint
    from ctxext.compare.options import CompareOptions
    from ctxext.compare.run import compare
    from ctxext.converters.convert import convert, plan_conversion
    from ctxext.converters.inspection import inspect_checkpoint
    from ctxext.converters.options import ConvertOptions
    from ctxext.errors import CtxextError
    from ctxext.evaluate.run import evaluate
    from ctxext.evaluate.settings import Settings
    from ctxext.finetune.merge import merge
    from ctxext.finetune.options import TrainingOptions
    from ctxext.finetune.run import finetune
    from ctxext.finetune.training_data import TrainingData
    from ctxext.publish.push import plan_push, push
    from ctxext.recipes.base import Method
    from ctxext.recipes.methods.abf import AdjustedBase
    from ctxext.recipes.methods.adaptive import Adaptive
    from ctxext.recipes.methods.alibi_interpolation import AlibiInterpolation
    from ctxext.recipes.methods.bifocal import Bifocal
    from ctxext.recipes.methods.buckets import WiderBuckets
    from ctxext.recipes.methods.cope import Cope
    from ctxext.recipes.methods.distance_aware import DistanceAware
    from ctxext.recipes.methods.dual_chunk import DualChunk
    from ctxext.recipes.methods.dynamic import DynamicNtk
    from ctxext.recipes.methods.llama3 import Llama3
    from ctxext.recipes.methods.longrope import LongRope
    from ctxext.recipes.methods.mrrope import MrRope
    from ctxext.recipes.methods.mspoe import MsPoE
    from ctxext.recipes.methods.ntk import Ntk
    from ctxext.recipes.methods.ntk_alibi import NtkAlibi
    from ctxext.recipes.methods.ntk_by_parts import NtkByParts
    from ctxext.recipes.methods.pi import PositionInterpolation
    from ctxext.recipes.methods.range import Range
    from ctxext.recipes.methods.rerope import ReRope
    from ctxext.recipes.methods.resonance import Resonance
    from ctxext.recipes.methods.self_extend import SelfExtend
    from ctxext.recipes.methods.sinks import Sinks
    from ctxext.recipes.methods.string import String
    from ctxext.recipes.methods.table import Table
    from ctxext.recipes.methods.window import Window
    from ctxext.recipes.methods.yarn import Yarn
    from ctxext.recipes.recipe import Recipe, load_recipe
    from ctxext.recipes.registry import METHODS
    from ctxext.search.options import SearchOptions
    from ctxext.search.run import search
    from ctxext.verify.run import verify

__all__ = [
    "METHODS",
    "Adaptive",
    "AdjustedBase",
    "AlibiInterpolation",
    "Bifocal",
    "CompareOptions",
    "ConvertOptions",
    "Cope",
    "CtxextError",
    "DistanceAware",
    "DualChunk",
    "DynamicNtk",
    "Llama3",
    "LongRope",
    "Method",
    "MrRope",
    "MsPoE",
    "Ntk",
    "NtkAlibi",
    "NtkByParts",
    "PositionInterpolation",
    "Range",
    "ReRope",
    "Recipe",
    "Resonance",
    "SearchOptions",
    "SelfExtend",
    "Settings",
    "Sinks",
    "String",
    "Table",
    "TrainingData",
    "TrainingOptions",
    "WiderBuckets",
    "Window",
    "Yarn",
    "__version__",
    "compare",
    "convert",
    "evaluate",
    "finetune",
    "inspect_checkpoint",
    "load_recipe",
    "merge",
    "open_checkpoint",
    "plan_conversion",
    "plan_push",
    "push",
    "search",
    "verify",
]

_NAMES = {
    "PositionInterpolation": "ctxext.recipes.methods.pi",
    "Ntk": "ctxext.recipes.methods.ntk",
    "AdjustedBase": "ctxext.recipes.methods.abf",
    "NtkByParts": "ctxext.recipes.methods.ntk_by_parts",
    "Yarn": "ctxext.recipes.methods.yarn",
    "Llama3": "ctxext.recipes.methods.llama3",
    "LongRope": "ctxext.recipes.methods.longrope",
    "MrRope": "ctxext.recipes.methods.mrrope",
    "Resonance": "ctxext.recipes.methods.resonance",
    "Cope": "ctxext.recipes.methods.cope",
    "DynamicNtk": "ctxext.recipes.methods.dynamic",
    "MsPoE": "ctxext.recipes.methods.mspoe",
    "SelfExtend": "ctxext.recipes.methods.self_extend",
    "Bifocal": "ctxext.recipes.methods.bifocal",
    "DualChunk": "ctxext.recipes.methods.dual_chunk",
    "ReRope": "ctxext.recipes.methods.rerope",
    "String": "ctxext.recipes.methods.string",
    "Adaptive": "ctxext.recipes.methods.adaptive",
    "Sinks": "ctxext.recipes.methods.sinks",
    "Window": "ctxext.recipes.methods.window",
    "DistanceAware": "ctxext.recipes.methods.distance_aware",
    "Table": "ctxext.recipes.methods.table",
    "Range": "ctxext.recipes.methods.range",
    "NtkAlibi": "ctxext.recipes.methods.ntk_alibi",
    "AlibiInterpolation": "ctxext.recipes.methods.alibi_interpolation",
    "WiderBuckets": "ctxext.recipes.methods.buckets",
    "Method": "ctxext.recipes.base",
    "METHODS": "ctxext.recipes.registry",
    "Recipe": "ctxext.recipes.recipe",
    "load_recipe": "ctxext.recipes.recipe",
    "convert": "ctxext.converters.convert",
    "plan_conversion": "ctxext.converters.convert",
    "ConvertOptions": "ctxext.converters.options",
    "CompareOptions": "ctxext.compare.options",
    "CtxextError": "ctxext.errors",
    "open_checkpoint": "ctxext.checkpoint.opening",
    "inspect_checkpoint": "ctxext.converters.inspection",
    "merge": "ctxext.finetune.merge",
    "plan_push": "ctxext.publish.push",
    "push": "ctxext.publish.push",
    "Settings": "ctxext.evaluate.settings",
    "SearchOptions": "ctxext.search.options",
    "TrainingData": "ctxext.finetune.training_data",
    "TrainingOptions": "ctxext.finetune.options",
}
hand_on(__name__, _NAMES, packages=("compare", "evaluate", "finetune", "search", "verify"))
