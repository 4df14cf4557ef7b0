"""Gentler slopes for ALiBi: one factor for all heads, or a smaller one for steeper heads."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from ctxext.checkpoint.families import Family
from ctxext.recipes.base import Reaching
from ctxext.recipes.code.method import PORTABLE, CodeMethod
from ctxext.recipes.encodings.biases import Alibi
from ctxext.recipes.encodings.rotary import Config, ModelConfig
from ctxext.recipes.param import param

_FAMILIES = ("bloom", "falcon", "mpt")


class Slopes(Reaching, CodeMethod):
    """Base of the methods that flatten the slopes of ALiBi: m_h becomes m_h · s^(−e_h)."""

    kind = "slopes"
    encoding = "alibi"
    is_published = False
    neutral: ClassVar[Mapping[str, Any]] = {"factor": 1, "rows": "static"}
    code = (PORTABLE / "row_slopes.py",)
    code_class = "RowSlopes"

    rows: str = param(
        "row-wise",
        help="Divide slopes as each query position needs, which keeps short inputs unchanged, or all by the factor.",
        choices=("row-wise", "static"),
    )

    @abstractmethod
    def exponents(self, num_heads: int) -> list[float]:
        """Return the exponent e of each head.

        0 keeps a slope, 1 divides it by the whole factor.
        """

    def settings(self, model: ModelConfig) -> dict[str, Any]:
        """Return the parameters that the portable class reads, as plain JSON.

        They contain the exponents, and the length from which query positions are scaled.
        """
        step = self.resolve(model.encoding)
        assert isinstance(model.encoding, Alibi)
        return {
            "original_length": model.encoding.trained_length,
            "factor": step.scaling_factor if self.rows == "static" else None,
            "exponents": self.exponents(model.encoding.num_heads),
        }

    @classmethod
    def refusal(cls, config: Config, family: Family) -> str:
        """Return the reason why the method cannot apply; empty if it can.

        The family must be able to carry the code.
        """
        untested = "" if family.model_type in _FAMILIES else "its biases are untested"
        return super().refusal(config, family) or untested

    def caution_for(self, model: ModelConfig) -> str:
        """Return the warning for users of the result.

        It describes the effect within the original context length.
        """
        if self.rows == "static":
            return "every input changes, including short ones."
        return (
            "rows within the original context length stay unchanged; beyond it, slopes become gentler with each "
            "position, without a limit."
        )
