"""ALiBi with the flat slopes divided and the steep ones kept."""

from dataclasses import dataclass

from ctxext.recipes.encodings.biases import alibi_slopes
from ctxext.recipes.methods.alibi import Slopes


@dataclass(frozen=True, kw_only=True)
class NtkAlibi(Slopes):
    """Divide the gentlest slope of ALiBi by the whole factor and the steepest not at all. No training.

    m_h becomes m_h · s^(−(h − 1) / (H − 1)) for the head whose slope is the h-th from the steepest of H: so it is
    published for powers of two, and so it is here for any number of heads. s as in alibi-interpolation.
    """

    name = "ntk-alibi"
    title = "NTK-ALiBi"
    paper = "https://github.com/keezen/ntk_alibi"

    def exponents(self, num_heads: int) -> list[float]:
        """By the place of the head's slope among all, from the steepest."""
        slopes = alibi_slopes(num_heads)
        steepest = sorted(slopes, reverse=True)
        return [steepest.index(slope) / max(num_heads - 1, 1) for slope in slopes]
