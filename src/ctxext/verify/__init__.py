"""Verify a checkpoint: digests, configuration, code, and the model loaded without ctxext."""

from typing import TYPE_CHECKING

from ctxext.lazy import hand_on

if TYPE_CHECKING:
    from ctxext.verify.run import verify
    from ctxext.verify.subject import Finding

__all__ = ["Finding", "verify"]

_NAMES = {
    "verify": "ctxext.verify.run",
    "Finding": "ctxext.verify.subject",
}
hand_on(__name__, _NAMES, main="verify")
