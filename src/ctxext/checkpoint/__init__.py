"""A checkpoint as data: opening it, the families, what its configuration and its files say."""

from ctxext.checkpoint.opening import Checkpoint, open_checkpoint

__all__ = ["Checkpoint", "open_checkpoint"]
