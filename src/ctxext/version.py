"""The package's version, alone so that the build reads it without importing anything."""

__version__ = "0.3.0"
