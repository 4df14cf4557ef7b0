"""Attention sinks: the map of a relation method that reads the first keys and the last ones.

This file is copied into checkpoints.
"""

import torch

from .relation import Relation
from .relation_maps import Beyond, Map


class SinksMap(Map):
    """Map of the first keys and the last `window`, at positions among them (https://arxiv.org/abs/2309.17453)."""

    rotates_keys, drops_keys = False, True

    def __init__(self, settings):
        self.sinks, self.window = settings.get("sinks", 0), settings["window"]
        super().__init__(settings, self.sinks + self.window)

    def beyond(self, m):
        """Return the `Beyond` of query positions m: for the first keys the query is at sinks + window - 1."""
        far, near = torch.full_like(m, self.sinks), m - self.window + 1
        at_far = torch.full_like(m, self.sinks + self.window - 1)
        return Beyond(level=torch.ones_like(m), far=far, middle=near, near=near, at_far=at_far)


class Sinks(Relation):
    """Attention of sinks."""

    name = "sinks"
    map_class = SinksMap
