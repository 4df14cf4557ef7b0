"""The methods, in the order of help. To add a method, write its file and name it here."""

import difflib

from ctxext.errors import CtxextError
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

METHODS: tuple[type[Method], ...] = (
    PositionInterpolation,
    Ntk,
    AdjustedBase,
    NtkByParts,
    Yarn,
    Llama3,
    LongRope,
    MrRope,
    Resonance,
    Cope,
    DynamicNtk,
    MsPoE,
    SelfExtend,
    Bifocal,
    DualChunk,
    ReRope,
    String,
    Adaptive,
    Sinks,
    Window,
    DistanceAware,
    Table,
    Range,
    NtkAlibi,
    AlibiInterpolation,
    WiderBuckets,
)


BY_NAME = {key: method for method in METHODS for key in (method.name, *method.aliases)}
"""The methods by their names and aliases."""


def method_named(name: str) -> type[Method]:
    """The method class behind a name or an alias."""
    if name.lower() in BY_NAME:
        return BY_NAME[name.lower()]
    near = difflib.get_close_matches(name.lower(), BY_NAME)
    hint = f'Did you mean "{near[0]}"?' if near else f"Choose one of: {', '.join(m.name for m in METHODS)}."
    raise CtxextError(f'There is no method "{name}".', hint=hint)
