"""Verify a checkpoint: digests, configuration, code, and the model loaded without ctxext."""

from typing import TYPE_CHECKING

from ctxext.lazy import hand_on

if TYPE_CHECKING:
    from ctxext.verify.run import verify as verify
    from ctxext.verify.subject import Finding as Finding

__all__ = hand_on(__name__, main="verify")
