"""Does a checkpoint use its context? Tasks, scoring and plots."""

from typing import TYPE_CHECKING

from ctxext.lazy import hand_on

if TYPE_CHECKING:
    from ctxext.evaluate.run import evaluate as evaluate
    from ctxext.evaluate.settings import Settings as Settings

__all__ = hand_on(__name__, main="evaluate")
