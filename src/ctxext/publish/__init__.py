"""Publish finished checkpoints on the Hub."""
