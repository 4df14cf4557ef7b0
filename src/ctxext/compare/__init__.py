"""Which of the published methods suits a model? All of them applied in memory and asked the same."""

from typing import TYPE_CHECKING

from ctxext.lazy import hand_on

if TYPE_CHECKING:
    from ctxext.compare.options import CompareOptions as CompareOptions
    from ctxext.compare.run import compare as compare

__all__ = hand_on(__name__, main="compare")
