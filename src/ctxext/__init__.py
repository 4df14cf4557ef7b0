"""ctxext: make a language model read more."""

from ctxext.version import __version__

__all__ = ["__version__"]
