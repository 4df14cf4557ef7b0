"""Comparison of the published methods on a model: all applied in memory and evaluated on the same prompts."""
