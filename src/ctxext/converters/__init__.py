"""Converting checkpoints: plan what would be written, then write it."""

from typing import TYPE_CHECKING

from ctxext.lazy import hand_on

if TYPE_CHECKING:
    from ctxext.converters.convert import Conversion, convert
    from ctxext.converters.plan import Plan, make_plan

__all__ = ["Conversion", "Plan", "convert", "make_plan"]

_NAMES = {
    "Conversion": "ctxext.converters.convert",
    "convert": "ctxext.converters.convert",
    "Plan": "ctxext.converters.plan",
    "make_plan": "ctxext.converters.plan",
}
hand_on(__name__, _NAMES)
