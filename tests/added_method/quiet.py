"""A method with code as somebody would add it: this recipe class, `quiet_attention.py` and `quiet_reference.py`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ctxext.families import rotated_layers
from ctxext.recipes.code import CodeMethod
from ctxext.recipes.param import param
from ctxext.recipes.rotary import ModelConfig

HERE = Path(__file__).parent


@dataclass(frozen=True, kw_only=True)
class Quiet(CodeMethod):
    """Multiply the scores of every query by one number. For tests only."""

    name = "quiet"
    title = "Quiet attention"
    paper = "https://example.org/quiet"
    kind = "attention"
    code = (HERE / "quiet_attention.py",)
    code_class = "Quiet"
    reference = HERE / "quiet_reference.py"

    loudness: float = param(0.5, help="What scores are multiplied by.", min=0.01, max=1, search=(0.1, 1.0))

    def settings(self, model: ModelConfig) -> dict[str, Any]:
        """The number and the layers."""
        return {"loudness": self.loudness, "layers": rotated_layers(model.config, model.family)}
