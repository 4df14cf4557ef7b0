"""A longer table of computed sinusoids."""

from collections.abc import Iterator

from typing_extensions import override

from ctxext.recipes.encodings.learned import COMPUTED, LearnedTable
from ctxext.recipes.methods.fills import continue_sinusoids
from ctxext.recipes.methods.table import Rows


class Range(Rows):
    """Extend a table of computed sinusoids to more positions, without scaling them. No training.

    Row p contains sin and cos of p / 10000^(2i/d). Short inputs stay unchanged. Vaswani et al. 2017, section 3.5.
    """

    name = "range"
    title = "Longer sinusoidal table"
    paper = "https://arxiv.org/abs/1706.03762"
    encoding = "sinusoidal"
    layouts = COMPUTED
    may_be_absent = True
    caution = "positions beyond the original context length are untrained, and quality is lower there."

    @override
    def rows(self, raw: memoryview, dtype: str, width: int, new: LearnedTable) -> Iterator[bytes]:
        return continue_sinusoids(raw, dtype, width, new.num_special, new.context_length)
