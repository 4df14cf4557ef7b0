"""Find the recipe for a model by measuring recipes on it, without training."""

from typing import TYPE_CHECKING

from ctxext.lazy import hand_on

if TYPE_CHECKING:
    from ctxext.search.options import SearchOptions as SearchOptions
    from ctxext.search.run import Found as Found
    from ctxext.search.run import search as search

__all__ = hand_on(__name__, main="search")
