"""Converting checkpoints: plan what would be written, then write it."""
