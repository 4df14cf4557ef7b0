"""Converting checkpoints: plan what would be written, then write it."""

from ctxext.converters.convert import Conversion, convert
from ctxext.converters.plan import Plan, make_plan

__all__ = ["Conversion", "Plan", "convert", "make_plan"]
