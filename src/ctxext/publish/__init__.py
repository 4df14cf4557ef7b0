"""Publish finished checkpoints on the Hub."""

from typing import TYPE_CHECKING

from ctxext.lazy import hand_on

if TYPE_CHECKING:
    from ctxext.publish.push import Push, PushOptions, plan_push, push

__all__ = ["Push", "PushOptions", "plan_push", "push"]

_NAMES = {
    "Push": "ctxext.publish.push",
    "PushOptions": "ctxext.publish.push",
    "plan_push": "ctxext.publish.push",
    "push": "ctxext.publish.push",
}
hand_on(__name__, _NAMES)
