"""Find the recipe for a model by measuring recipes on it, without training."""

from ctxext.search.options import SearchOptions
from ctxext.search.run import Found, search

__all__ = ["Found", "SearchOptions", "search"]
