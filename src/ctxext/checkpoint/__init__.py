"""A checkpoint as data: opening it, the families, what its configuration and its files say."""

from typing import TYPE_CHECKING

from ctxext.lazy import hand_on

if TYPE_CHECKING:
    from ctxext.checkpoint.opening import Checkpoint, open_checkpoint

__all__ = ["Checkpoint", "open_checkpoint"]

_NAMES = {
    "Checkpoint": "ctxext.checkpoint.opening",
    "open_checkpoint": "ctxext.checkpoint.opening",
}
hand_on(__name__, _NAMES)
