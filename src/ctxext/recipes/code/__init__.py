"""Checkpoints with modeling code: layout, verification of the code, and the folder to load from."""
