"""Checkpoints with modeling code: its layout, which code is ours, and the folder that is loaded."""
