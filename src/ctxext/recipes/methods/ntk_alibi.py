"""ALiBi with divided flat slopes and unchanged steep ones."""

from ctxext.recipes.encodings.biases import alibi_slopes
from ctxext.recipes.methods.alibi import Slopes


class NtkAlibi(Slopes):
    """Divide the gentlest ALiBi slope by the factor, keep the steepest, and scale those between in part. No training.

    The h-th steepest slope m_h of H becomes m_h · s^(−(h − 1) / (H − 1)), for any number of heads (published for powers
    of two); s as in alibi-interpolation. The first choice for ALiBi models.
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
