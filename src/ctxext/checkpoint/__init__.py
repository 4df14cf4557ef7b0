"""A checkpoint as data: opening it, model families, and the facts in its configuration and its files."""
