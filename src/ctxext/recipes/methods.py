"""The methods, in the order in which help shows them. Adding one is a file and a name here."""

import difflib

from ctxext.errors import CtxextError
from ctxext.recipes.abf import AdjustedBase
from ctxext.recipes.adaptive import Adaptive
from ctxext.recipes.alibi import AlibiInterpolation, NtkAlibi
from ctxext.recipes.base import Method
from ctxext.recipes.buckets import WiderBuckets
from ctxext.recipes.distance_aware import DistanceAware
from ctxext.recipes.divided import Cope, MrRope, Resonance
from ctxext.recipes.dual_chunk import DualChunk
from ctxext.recipes.dynamic import DynamicNtk
from ctxext.recipes.llama3 import Llama3
from ctxext.recipes.longrope import LongRope
from ctxext.recipes.mspoe import MsPoE
from ctxext.recipes.ntk import Ntk
from ctxext.recipes.pi import PositionInterpolation
from ctxext.recipes.relation import Bifocal, ReRope, SelfExtend, Sinks, String, Window
from ctxext.recipes.table import Range, Table
from ctxext.recipes.yarn import NtkByParts, Yarn

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


def method_named(name: str) -> type[Method]:
    """The method class behind a name or an alias.

    Raises:
        CtxextError: there is none; the nearest name is suggested.
    """
    table = {key: method for method in METHODS for key in (method.name, *method.aliases)}
    if name.lower() in table:
        return table[name.lower()]
    near = difflib.get_close_matches(name.lower(), table)
    hint = f'Did you mean "{near[0]}"?' if near else f"Choose one of: {', '.join(m.name for m in METHODS)}."
    raise CtxextError(f'There is no method "{name}".', hint=hint)
