"""Checks of how an engine or a running server reads a checkpoint."""
