"""The small checkpoint in the package."""
