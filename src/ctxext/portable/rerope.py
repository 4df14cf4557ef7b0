"""ReRoPE: the map of a relation method. This file is copied into checkpoints."""

import torch

from .relation import Relation
from .relation_maps import Beyond, Map


class ReRopeMap(Map):
    """Map with all far keys at one distance, the window (Su 2023, https://kexue.fm/archives/9708)."""

    def __init__(self, settings):
        self.window = settings["window"]
        super().__init__(settings, max(settings["original_length"], self.window))

    def beyond(self, m):
        """Return the `Beyond` of query positions m: for far keys the query is at w."""
        near, at_far = m - self.window + 1, torch.full_like(m, self.window)
        return Beyond(level=torch.ones_like(m), far=near, middle=near, near=near, at_far=at_far)

    def far_keys(self, n, level):
        """Return position 0 for every key."""
        return torch.zeros_like(n)


class Rerope(Relation):
    """Attention of rerope."""

    name = "rerope"
    map_class = ReRopeMap
