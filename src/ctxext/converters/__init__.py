"""Converting checkpoints: plan what would be written, then write it."""

from typing import TYPE_CHECKING

from ctxext.lazy import hand_on

if TYPE_CHECKING:
    from ctxext.converters.convert import Conversion as Conversion
    from ctxext.converters.convert import convert as convert
    from ctxext.converters.plan import Plan as Plan
    from ctxext.converters.plan import make_plan as make_plan

__all__ = hand_on(__name__)
