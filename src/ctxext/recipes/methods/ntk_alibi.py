"""ALiBi with divided flat slopes and unchanged steep ones."""

from collections.abc import Mapping
from typing import Any, ClassVar

from typing_extensions import override

from ctxext.checkpoint.families import Family
from ctxext.recipes.base import Reaching
from ctxext.recipes.code.method import PORTABLE, CodeMethod
from ctxext.recipes.encodings.base import Config
from ctxext.recipes.encodings.biases import Alibi, alibi_slopes
from ctxext.recipes.model_config import ModelConfig
from ctxext.recipes.param import param

_FAMILIES = ("bloom", "falcon", "mpt")


class NtkAlibi(Reaching, CodeMethod):
    """Divide the gentlest ALiBi slope by the factor, keep the steepest, and partly scale the others. No training.

    The h-th steepest slope m_h of H becomes m_h · s^(−(h − 1) / (H − 1)), for any number of heads (published for powers
    of two). By default s is max(1, (m + 1) / L) for the query at position m, regardless of the batch.
    """

    name = "ntk-alibi"
    title = "NTK-ALiBi"
    paper = "https://github.com/keezen/ntk_alibi"
    kind = "slopes"
    encoding = "alibi"
    is_published = False
    neutral: ClassVar[Mapping[str, Any]] = {"factor": 1, "rows": "static"}
    code = (PORTABLE / "row_slopes.py",)
    code_class = "RowSlopes"

    rows: str = param(
        "row-wise",
        help="row-wise: scale slopes per query position, which keeps short inputs unchanged; static: by the factor.",
        choices=("row-wise", "static"),
    )

    def exponents(self, num_heads: int) -> list[float]:
        """Return the exponent e of each head: its slope m becomes m · s^(−e).

        It depends on the rank of the head's slope, from the steepest.
        """
        slopes = alibi_slopes(num_heads)
        steepest = sorted(slopes, reverse=True)
        return [steepest.index(slope) / max(num_heads - 1, 1) for slope in slopes]

    @override
    def settings(self, model: ModelConfig) -> dict[str, Any]:
        step = self.resolve(model.encoding)
        assert isinstance(model.encoding, Alibi)
        return {
            "original_length": model.encoding.trained_length,
            "factor": step.scaling_factor if self.rows == "static" else None,
            "exponents": self.exponents(model.encoding.num_heads),
        }

    @classmethod
    @override
    def refusal(cls, config: Config, family: Family) -> str:
        untested = "" if family.model_type in _FAMILIES else "its biases are untested"
        return super().refusal(config, family) or untested

    @override
    def caution_for(self, model: ModelConfig) -> str:
        if self.rows == "static":
            return "every input changes, including short ones."
        return (
            "query positions within the original context length stay unchanged; beyond it, slopes become gentler with "
            "each position, without a limit."
        )
