"""Modeling code that travels inside checkpoints: standard library, torch and transformers only."""
