"""Position Interpolation for ALiBi (2310.13017): slopes divided by the factor; row by row on request."""

import math


def slopes_of(heads):
    """ALiBi (2108.12409), as its authors' get_slopes has it."""
    if math.log2(heads).is_integer():
        start = 2 ** (-(2 ** -(math.log2(heads) - 3)))
        return [start * start**i for i in range(heads)]
    closest = 2 ** math.floor(math.log2(heads))
    return slopes_of(closest) + slopes_of(2 * closest)[0::2][: heads - closest]


def stretch(settings, m):
    """The factor of the row at m: the same for all, or how many times the original length it ends."""
    return settings["factor"] or max(1, (m + 1) / settings["original_length"])


def slopes(settings, heads, m):
    """The slope of each head for the row at m."""
    return [slope / stretch(settings, m) for slope in slopes_of(heads)]
