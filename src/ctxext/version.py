"""The package's version, in a separate file so that the build reads it without an import."""

__version__ = "0.3.0"
