"""A checkpoint as data: opening it, the families, what its configuration and its files say."""

from typing import TYPE_CHECKING

from ctxext.lazy import hand_on

if TYPE_CHECKING:
    from ctxext.checkpoint.opening import Checkpoint as Checkpoint
    from ctxext.checkpoint.opening import open_checkpoint as open_checkpoint

__all__ = hand_on(__name__)
