"""Comparison of the published methods on a model: applied in memory and evaluated on the same prompts."""
