"""Checkpoints: opening and loading them, model families, and the properties in config.json and other files."""
