"""Verify a checkpoint: digests, configuration, code, and the model loaded without ctxext."""
