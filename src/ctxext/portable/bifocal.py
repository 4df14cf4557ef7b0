"""Bifocal attention, and groups per pair: the map of a relation method. This file travels inside checkpoints."""

import torch

from .method import exact
from .relation import Relation
from .relation_maps import Beyond, Map, floored


class BifocalMap(Map):
    """Near keys exact, far ones grouped, as in Jet-Long (2607.07740). With `groups`, per pair: DPE (2504.18857).

    `border`: "published" reads d <= w as near, with a jump after it; "continuous" shifts and groups as Self-Extend.
    """

    def __init__(self, settings):
        self.window, self.groups = settings["window"], settings.get("groups")
        self.is_continuous = settings.get("border", "published") == "continuous"
        self.exact = self.window * self.is_continuous  # Distances up to this are exact.
        super().__init__(settings, max(settings["original_length"], self.window + 1))

    def last_rung(self, length):
        """Return the highest level among the first `length` positions: see `beyond`."""
        return 1 if self.groups else (length - 1 - self.exact) // (self.length - self.exact) + 1

    def grouped(self, n, rung):
        """Return positions (b, k) and groups (b, 1) that broadcast, or (b, k, 1) and (p) with a group per pair."""
        return (n[..., None], torch.tensor(self.groups, device=n.device)) if self.groups else (n, rung)

    def beyond(self, m):
        """Return the `Beyond` of query positions m. Their group is ceil((m + 1 - exact) / (L - exact))."""
        by_row = torch.div(m - self.exact, self.length - self.exact, rounding_mode="floor") + 1
        rung = torch.ones_like(m) if self.groups else by_row
        near = m - self.window + int(self.is_continuous)
        at, group = self.grouped(m, rung.clamp(min=1))
        at_far = floored(at, group) + (self.exact - self.exact / exact(group))
        return Beyond(rung=rung, far=near, middle=near, near=near, at_far=at_far)

    def far_keys(self, n, rung):
        """Return the positions floor(n / group)."""
        return floored(*self.grouped(n, rung))


class Bifocal(Relation):
    """Attention of bifocal."""

    name = "bifocal"
    map_class = BifocalMap
