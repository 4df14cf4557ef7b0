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
from ctxext.version import __version__ as __version__

if TYPE_CHECKING:
    from ctxext.checkpoint.opening import open_checkpoint as open_checkpoint
    from ctxext.compare.options import CompareOptions as CompareOptions
    from ctxext.compare.run import compare as compare
    from ctxext.converters.convert import convert as convert
    from ctxext.converters.convert import plan_conversion as plan_conversion
    from ctxext.converters.inspection import inspect_checkpoint as inspect_checkpoint
    from ctxext.converters.options import ConvertOptions as ConvertOptions
    from ctxext.errors import CtxextError as CtxextError
    from ctxext.evaluate.run import evaluate as evaluate
    from ctxext.evaluate.settings import Settings as Settings
    from ctxext.finetune.merge import merge as merge
    from ctxext.finetune.options import TrainingOptions as TrainingOptions
    from ctxext.finetune.run import finetune as finetune
    from ctxext.finetune.training_data import TrainingData as TrainingData
    from ctxext.publish.push import plan_push as plan_push
    from ctxext.publish.push import push as push
    from ctxext.recipes.base import Method as Method
    from ctxext.recipes.methods.abf import AdjustedBase as AdjustedBase
    from ctxext.recipes.methods.adaptive import Adaptive as Adaptive
    from ctxext.recipes.methods.alibi_interpolation import AlibiInterpolation as AlibiInterpolation
    from ctxext.recipes.methods.bifocal import Bifocal as Bifocal
    from ctxext.recipes.methods.buckets import WiderBuckets as WiderBuckets
    from ctxext.recipes.methods.cope import Cope as Cope
    from ctxext.recipes.methods.distance_aware import DistanceAware as DistanceAware
    from ctxext.recipes.methods.dual_chunk import DualChunk as DualChunk
    from ctxext.recipes.methods.dynamic import DynamicNtk as DynamicNtk
    from ctxext.recipes.methods.llama3 import Llama3 as Llama3
    from ctxext.recipes.methods.longrope import LongRope as LongRope
    from ctxext.recipes.methods.mrrope import MrRope as MrRope
    from ctxext.recipes.methods.mspoe import MsPoE as MsPoE
    from ctxext.recipes.methods.ntk import Ntk as Ntk
    from ctxext.recipes.methods.ntk_alibi import NtkAlibi as NtkAlibi
    from ctxext.recipes.methods.ntk_by_parts import NtkByParts as NtkByParts
    from ctxext.recipes.methods.pi import PositionInterpolation as PositionInterpolation
    from ctxext.recipes.methods.range import Range as Range
    from ctxext.recipes.methods.rerope import ReRope as ReRope
    from ctxext.recipes.methods.resonance import Resonance as Resonance
    from ctxext.recipes.methods.self_extend import SelfExtend as SelfExtend
    from ctxext.recipes.methods.sinks import Sinks as Sinks
    from ctxext.recipes.methods.string import String as String
    from ctxext.recipes.methods.table import Table as Table
    from ctxext.recipes.methods.window import Window as Window
    from ctxext.recipes.methods.yarn import Yarn as Yarn
    from ctxext.recipes.recipe import Recipe as Recipe
    from ctxext.recipes.recipe import load_recipe as load_recipe
    from ctxext.recipes.registry import METHODS as METHODS
    from ctxext.search.options import SearchOptions as SearchOptions
    from ctxext.search.run import search as search
    from ctxext.verify.run import verify as verify

_PACKAGES = ("compare", "evaluate", "finetune", "search", "verify")
__all__ = ["__version__", *hand_on(__name__, packages=_PACKAGES)]
