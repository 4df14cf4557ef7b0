"""Measure the order of heads once, over calibration text, for a checkpoint that keeps no state per prompt."""

from dataclasses import dataclass
from pathlib import Path

from ctxext.checkpoint import Checkpoint
from ctxext.converters.apply import Progress
from ctxext.errors import CtxextError
from ctxext.recipes.mspoe import MsPoE
from ctxext.recipes.recipe import Recipe


@dataclass(frozen=True)
class Calibration:
    """How a calibrated head order is measured.

    Attributes:
        text: A text or JSONL file; the package's own prose where None.
        device: Where the model runs: auto, cpu, cuda or mps.
        dtype: In which type: auto (as saved), bf16, fp16 or fp32.
    """

    text: Path | None = None
    device: str = "auto"
    dtype: str = "auto"


def needs_calibration(recipe: Recipe) -> bool:
    """Whether a step waits for a measured order."""
    return any(isinstance(step, MsPoE) and step.head_order == "calibrated" and not step.ranks for step in recipe.steps)


def calibrated(
    source: Checkpoint,
    recipe: Recipe,
    calibration: Calibration,
    *,
    replace_scaling: bool = False,
    progress: Progress | None = None,
) -> Recipe:
    """The same recipe with the order of heads measured on this model, where a step waits for it. Loads the model.

    Raises:
        CtxextError: the text cannot be read, or the model does not load.
    """
    if not needs_calibration(recipe):
        return recipe
    raise CtxextError("--head-order calibrated is not there yet.")
