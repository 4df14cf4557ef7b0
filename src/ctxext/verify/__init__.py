"""Verify a checkpoint: digests, configuration, code, and the model loaded without ctxext."""

from ctxext.verify.run import verify
from ctxext.verify.subject import Finding

__all__ = ["Finding", "verify"]
