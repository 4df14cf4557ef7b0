"""Which of the published methods suits a model? All of them applied in memory and asked the same."""

from typing import TYPE_CHECKING

from ctxext.lazy import hand_on

if TYPE_CHECKING:
    from ctxext.compare.options import CompareOptions
    from ctxext.compare.run import compare

__all__ = ["CompareOptions", "compare"]

_NAMES = {
    "compare": "ctxext.compare.run",
    "CompareOptions": "ctxext.compare.options",
}
hand_on(__name__, _NAMES, main="compare")
