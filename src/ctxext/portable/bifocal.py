"""Bifocal attention: the map of a relation method. This file is copied into checkpoints."""

import torch

from .method import exact
from .relation import Relation
from .relation_maps import Beyond, Map, floor_divide


class BifocalMap(Map):
    """Map with exact near keys and grouped far keys, as in Jet-Long (2607.07740), and the border of Self-Extend."""

    def __init__(self, settings):
        self.window = settings["window"]
        super().__init__(settings, max(settings["original_length"], self.window + 1))

    def last_level(self, length):
        """Return the highest level among the first `length` positions: see `beyond`."""
        return (length - 1 - self.window) // (self.length - self.window) + 1

    def beyond(self, m):
        """Return the `Beyond` of query positions m. Their group is ceil((m + 1 - w) / (L - w))."""
        level = torch.div(m - self.window, self.length - self.window, rounding_mode="floor") + 1
        near, group = m - self.window + 1, level.clamp(min=1)
        at_far = floor_divide(m, group) + (self.window - self.window / exact(group))
        return Beyond(level=level, far=near, middle=near, near=near, at_far=at_far)

    def far_keys(self, n, level):
        """Return the positions floor(n / group)."""
        return floor_divide(n, level)


class Bifocal(Relation):
    """Attention of bifocal."""

    name = "bifocal"
    map_class = BifocalMap
