"""A checkpoint as data: opening it, the families, what its configuration and its files say."""
