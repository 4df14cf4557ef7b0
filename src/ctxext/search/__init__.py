"""Find the recipe for a model by measuring recipes on it, without training."""

from typing import TYPE_CHECKING

from ctxext.lazy import hand_on

if TYPE_CHECKING:
    from ctxext.search.options import SearchOptions
    from ctxext.search.run import Found, search

__all__ = ["Found", "SearchOptions", "search"]

_NAMES = {
    "SearchOptions": "ctxext.search.options",
    "Found": "ctxext.search.run",
    "search": "ctxext.search.run",
}
hand_on(__name__, _NAMES, main="search")
