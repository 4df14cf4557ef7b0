"""Checking finished checkpoints and putting them on the Hub."""

from ctxext.publish.push import Push, PushOptions, push
from ctxext.publish.subject import Finding
from ctxext.publish.verify import verify

__all__ = ["Finding", "Push", "PushOptions", "push", "verify"]
