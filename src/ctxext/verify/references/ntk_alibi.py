"""NTK-ALiBi (keezen/ntk_alibi): the base of the slopes changes, so that the steepest stays and the gentlest is s-th."""

import math


def slopes_of(heads):
    """ALiBi (2108.12409), as its authors' get_slopes has it."""
    if math.log2(heads).is_integer():
        start = 2 ** (-(2 ** -(math.log2(heads) - 3)))
        return [start * start**i for i in range(heads)]
    closest = 2 ** math.floor(math.log2(heads))
    return slopes_of(closest) + slopes_of(2 * closest)[0::2][: heads - closest]


def slopes(settings, heads, m):
    """The slope of each head for the row at m; heads count by their slopes, the steepest first."""
    s = settings["factor"] or max(1, (m + 1) / settings["original_length"])
    plain = slopes_of(heads)
    if heads == 1:
        return plain
    shrink = s ** (1 / (heads - 1))
    return [slope / shrink ** sum(other > slope for other in plain) for slope in plain]
