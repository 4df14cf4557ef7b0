"""ALiBi with divided flat slopes and unchanged steep ones."""

from ctxext.recipes.encodings.biases import alibi_slopes
from ctxext.recipes.methods.alibi import Slopes


class NtkAlibi(Slopes):
    """Divide the gentlest ALiBi slope by the whole factor and keep the steepest, with all others between. No training.

    The slope m_h becomes m_h · s^(−(h − 1) / (H − 1)) for the head with the h-th steepest of H slopes, as published for
    powers of two and used here for any number of heads; s as in alibi-interpolation. Use it first for BLOOM, MPT and
    Falcon with ALiBi.
    """

    name = "ntk-alibi"
    title = "NTK-ALiBi"
    paper = "https://github.com/keezen/ntk_alibi"

    def exponents(self, num_heads: int) -> list[float]:
        """Return the exponent e of each head.

        It depends on the rank of the head's slope, from the steepest.
        """
        slopes = alibi_slopes(num_heads)
        steepest = sorted(slopes, reverse=True)
        return [steepest.index(slope) / max(num_heads - 1, 1) for slope in slopes]
