"""StreamingLLM: the first tokens and the most recent ones."""

from typing import Any

from typing_extensions import override

from ctxext.recipes.code.method import PORTABLE
from ctxext.recipes.methods.relation import Relation, require
from ctxext.recipes.param import param


class Sinks(Relation):
    """Attend to the first few tokens and the most recent ones only. Fluent at any length, without memory. A baseline.

    Distances count attended tokens only. Use it for endless streams, or to measure the gain from a longer memory. Xiao
    et al. 2023, section 3 (StreamingLLM).
    """

    name = "sinks"
    title = "StreamingLLM"
    paper = "https://arxiv.org/abs/2309.17453"
    code = (PORTABLE / "sinks.py", *Relation.code)
    code_class = "Sinks"
    is_experimental = True
    caution = "tokens between the first and the recent ones are not read."

    sinks: int = param(4, help="Number of initial tokens that are always attended to.", min=1)
    window: int | None = param(
        None, help="Number of recent tokens that are attended to. Default: L less the sinks.", min=1
    )

    @override
    def defaults(self, length: int) -> dict[str, Any]:
        return {"window": max(length - self.sinks, 1)}

    @override
    def problem(self, length: int, target: int) -> tuple[str, str] | None:
        if self.sinks + require(self.window) > length:
            return (
                f"{self.sinks} sinks and a window of {self.window} exceed the context length of {length} tokens.",
                f"--window {length - self.sinks}",
            )
        return None
