"""Does a checkpoint use its context? Tasks, scoring and plots."""

from typing import TYPE_CHECKING

from ctxext.lazy import hand_on

if TYPE_CHECKING:
    from ctxext.evaluate.run import evaluate
    from ctxext.evaluate.settings import Settings

__all__ = ["Settings", "evaluate"]

_NAMES = {
    "evaluate": "ctxext.evaluate.run",
    "Settings": "ctxext.evaluate.settings",
}
hand_on(__name__, _NAMES, main="evaluate")
