"""The small checkpoint that ships with the package."""
