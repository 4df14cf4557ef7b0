"""Find the recipe for a model by measuring recipes on it, without training."""
