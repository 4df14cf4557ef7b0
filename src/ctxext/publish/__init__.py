"""Publish finished checkpoints on the Hub."""

from ctxext.publish.push import Push, PushOptions, push

__all__ = ["Push", "PushOptions", "push"]
