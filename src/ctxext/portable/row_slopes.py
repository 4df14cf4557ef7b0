"""The slopes of ALiBi by the query position, for `ntk-alibi`.

This file is copied into checkpoints. A step contains `original_length` (L), `exponents` (e, one per head) and `factor`,
or null. The query at position m has the family's slopes times s^-e. s is `factor`, or max(1, (m + 1) / L) if that is
null, so that queries within L are bit-equal to the family's.
"""

import torch


class RowSlopes:
    """Factors on the slopes of each head, by the query position."""

    def __init__(self, step):
        self.length, self.factor, self.exponents = step["original_length"], step["factor"], step["exponents"]

    def leaves_alone(self, end):
        """Return whether queries before position `end` keep the family's slopes; False if `end` is a tensor."""
        return self.factor is None and isinstance(end, int) and end <= self.length

    def shares(self, positions):
        """Return the factors on the slopes (b or 1, h, l or 1, 1), for queries at `positions` (b or 1, l)."""
        exponents = torch.tensor(self.exponents, device=positions.device).view(1, -1, 1, 1)
        if self.factor is not None:
            return self.factor**-exponents
        return ((positions + 1) / self.length).clamp(min=1)[:, None, :, None] ** -exponents
