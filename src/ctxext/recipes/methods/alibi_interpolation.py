"""ALiBi with all slopes divided by the factor of each query position."""

from ctxext.recipes.methods.alibi import Slopes


class AlibiInterpolation(Slopes):
    """Divide all ALiBi slopes by the factor, so that far tokens fade as near ones did. No training.

    The slope m_h becomes m_h / s. By default s is max(1, (m + 1) / L) for the query at position m, regardless of the
    batch. ntk-alibi keeps near tokens sharper. Position Interpolation for ALiBi (2310.13017).
    """

    name = "alibi-interpolation"
    title = "ALiBi interpolation"
    paper = "https://arxiv.org/abs/2310.13017"

    def exponents(self, num_heads: int) -> list[float]:
        """Return the exponent e of each head.

        It is 1 for all heads.
        """
        return [1.0] * num_heads
