"""Dual chunk attention: the map of a relation method. This file is copied into checkpoints."""

import torch

from .relation import Relation
from .relation_maps import Beyond, Map


class DualChunkMap(Map):
    """Map with exact distances within a chunk and to the previous one; others end at a fixed position (2402.17463)."""

    def __init__(self, settings):
        self.size = settings["chunk_size"]
        self.chunk = self.size - settings["local"]
        super().__init__(settings, self.size)

    def beyond(self, m):
        """Return the `Beyond` of query positions m.

        For keys of the previous chunk the query is at min(m mod c + c, size), for earlier keys at `size`.
        """
        middle = (near := m - m % self.chunk) - self.chunk
        at_middle, at_far = (m - middle).clamp(max=self.size) + middle, torch.full_like(m, self.size)
        return Beyond(
            level=torch.ones_like(m), far=middle, middle=middle, near=near, at_far=at_far, at_middle=at_middle
        )

    def far_keys(self, n, level):
        """Return the positions n mod c."""
        return n % self.chunk


class Dca(Relation):
    """Attention of dca."""

    name = "dca"
    map_class = DualChunkMap
