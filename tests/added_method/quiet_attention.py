"""Quiet attention: all scores times one number."""

from .method import Method  # noqa: TID252


class Quiet(Method):
    """Multiplies queries, and so their scores."""

    name = "quiet"

    def attend(self, inner, call, query, key, value, mask, **kwargs):
        """The attention of quieter queries."""
        return inner(query * self.settings["loudness"], key, value, mask, **kwargs)
