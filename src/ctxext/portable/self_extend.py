"""Self-Extend: the map of a relation method. This file is copied into checkpoints."""

import torch

from .method import exact
from .relation import Relation
from .relation_maps import Beyond, Map, floor_divide


class SelfExtendMap(Map):
    """Map with far keys at grouped positions, continuous at the border to near keys (https://arxiv.org/abs/2401.01325).

    The level is the group size: the smallest that the query position needs. With a fixed `group` the level is 1.
    """

    def __init__(self, settings):
        self.window, self.group = settings["window"], settings.get("group")
        super().__init__(settings, max(settings["original_length"], self.window))

    def level(self, m):
        """Return the level of query positions m: the smallest group with w + (L - w) * group >= m + 1, or 1."""
        smallest = torch.div(m - self.window, self.length - self.window, rounding_mode="floor") + 1
        return smallest if self.group is None else torch.ones_like(m)

    def last_level(self, length):
        """Return the highest level among the first `length` positions: see `level`."""
        return 1 if self.group is not None else (length - 1 - self.window) // (self.length - self.window) + 1

    def beyond(self, m):
        """Return the `Beyond` of query positions m of at least `start`.

        For far keys the query is at `floor(m / group) + w - w / group`.
        """
        level, near = self.level(m), m - self.window + 1
        group = level.clamp(min=1) if self.group is None else torch.full_like(m, self.group)
        at_far = floor_divide(m, group) + (self.window - self.window / exact(group))
        return Beyond(level=level, far=near, middle=near, near=near, at_far=at_far)

    def far_keys(self, n, level):
        """Return the positions floor(n / group)."""
        return floor_divide(n, level if self.group is None else self.group)


class SelfExtend(Relation):
    """Attention of self-extend."""

    name = "self-extend"
    map_class = SelfExtendMap
