"""Frequencies per query position: the map of a relation method. This file is copied into checkpoints."""

import torch

from .method import exact
from .relation import Relation
from .relation_maps import Beyond, Map


class AdaptiveMap(Map):
    """Map with the schedule of each query's context length: that of the smallest factor >= (m + 1) / L.

    `inverse_frequencies` and `attention_factors` have one entry for each of the ascending `factors`. `base` contains
    the model's frequencies.
    """

    def __init__(self, settings):
        base, self.ends = settings["base"], [factor * settings["original_length"] for factor in settings["factors"]]
        self.shares = [[1.0] * len(base)] + [
            [new / old if old else 1.0 for new, old in zip(row, base, strict=True)]
            for row in settings["inverse_frequencies"]
        ]
        self.scales = [1.0] + [float(factor) ** 2 for factor in settings.get("attention_factors", [])]
        super().__init__(settings, settings["original_length"])

    def level(self, m):
        """Return the level of query positions m: the index of their factor, from 1."""
        return sum((m >= end).long() for end in self.ends[:-1]) + torch.ones_like(m)

    def last_level(self, length):
        """Return the number of factors."""
        return len(self.ends)

    def beyond(self, m):
        """Return the `Beyond` of query positions m: all keys are far, at their own positions."""
        end = m + 1
        return Beyond(level=self.level(m), far=end, middle=end, near=end, at_far=m)

    def frequency_factors(self, level):
        """Return the frequencies of a level, divided by the model's."""
        kind = exact(torch.zeros(0, device=level.device)).dtype
        return torch.tensor(self.shares, device=level.device, dtype=kind)[level]

    def rotary_temperature(self, m):
        """Return the squared attention factor of query positions m. As in YaRN, it applies to the rotary part only."""
        if len(self.scales) == 1:
            return None
        return torch.tensor(self.scales, device=m.device)[torch.where(m >= self.start, self.level(m), 0)]


class Adaptive(Relation):
    """Attention of adaptive."""

    name = "adaptive"
    map_class = AdaptiveMap
