"""Publish finished checkpoints on the Hub."""

from typing import TYPE_CHECKING

from ctxext.lazy import hand_on

if TYPE_CHECKING:
    from ctxext.publish.push import Push as Push
    from ctxext.publish.push import PushOptions as PushOptions
    from ctxext.publish.push import plan_push as plan_push
    from ctxext.publish.push import push as push

__all__ = hand_on(__name__)
