"""Self-Extend: the map of a relation method. This file travels inside checkpoints."""

import torch

from .method import exact
from .relation import Relation
from .relation_maps import Beyond, Map, floored


class SelfExtendMap(Map):
    """Far keys at grouped positions that meet the near ones at the border. https://arxiv.org/abs/2401.01325.

    The level is the group: the smallest that the query position needs. With a fixed `group` the level is 1.
    """

    def __init__(self, settings):
        self.window, self.group = settings["window"], settings.get("group")
        super().__init__(settings, max(settings["original_length"], self.window))

    def rung(self, m):
        """Return the level of query positions m: the smallest group with w + (L - w) * group >= m + 1, or 1."""
        smallest = torch.div(m - self.window, self.length - self.window, rounding_mode="floor") + 1
        return smallest if self.group is None else torch.ones_like(m)

    def last_rung(self, length):
        """Return the highest level among the first `length` positions: see `rung`."""
        return 1 if self.group is not None else (length - 1 - self.window) // (self.length - self.window) + 1

    def beyond(self, m):
        """Return the `Beyond` of query positions m of at least `start`.

        For far keys the query is at `floor(m / group) + w - w / group`.
        """
        rung, near = self.rung(m), m - self.window + 1
        group = rung.clamp(min=1) if self.group is None else torch.full_like(m, self.group)
        at_far = floored(m, group) + (self.window - self.window / exact(group))
        return Beyond(rung=rung, far=near, middle=near, near=near, at_far=at_far)

    def far_keys(self, n, rung):
        """Return the positions floor(n / group)."""
        return floored(n, rung if self.group is None else self.group)


class SelfExtend(Relation):
    """Attention of self-extend."""

    name = "self-extend"
    map_class = SelfExtendMap
