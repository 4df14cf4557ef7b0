"""STRING: the map of a relation method. This file travels inside checkpoints."""

import torch

from .relation import Relation
from .relation_maps import Beyond, Map


class StringMap(Map):
    """Distances beyond `shift` are moved nearer, to begin again at `window`. https://arxiv.org/abs/2410.18745.

    `start` is the first query position that does so, by default the first beyond the original context length.
    """

    turns_keys = False

    def __init__(self, settings):
        self.shift, self.window = settings["shift"], settings["window"]
        super().__init__(settings, max(settings.get("start", settings["original_length"]), self.shift + 1))

    def beyond(self, m):
        """Return the `Beyond` of query positions m: near is d <= shift; farther keys are at d - shift + window."""
        near = m - self.shift
        at_far = m + (self.window - self.shift)
        return Beyond(rung=torch.ones_like(m), far=near, middle=near, near=near, at_far=at_far)


class String(Relation):
    """Attention of string."""

    name = "string"
    map_class = StringMap
