"""Encodings of positions: how each is read from config.json and written back."""
