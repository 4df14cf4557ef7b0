"""Does a checkpoint use its context? Tasks, scoring and plots."""

from ctxext.evaluate.run import evaluate
from ctxext.evaluate.settings import Settings

__all__ = ["Settings", "evaluate"]
