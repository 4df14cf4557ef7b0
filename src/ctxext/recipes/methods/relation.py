"""Base of the methods that map the distance between query and key: near keys exact, far ones regrouped.

A map depends on the query position and never on the call. Inputs within the context length of the source give
bit-identical output, and a prompt gives the same logits whole, in chunks or from a cache. Each method's map is a file
in `portable/`; `portable/relation.py` is the attention.
"""

import dataclasses
from collections.abc import Mapping
from importlib.abc import Traversable
from typing import Any, ClassVar, Self

from typing_extensions import override

from ctxext.checkpoint.families import rotated_layers
from ctxext.errors import CtxextError
from ctxext.recipes.base import Kind, Reaching
from ctxext.recipes.code.method import PORTABLE, CodeMethod
from ctxext.recipes.encodings.base import Encoding
from ctxext.recipes.encodings.rotary import Rotary
from ctxext.recipes.model_config import ModelConfig
from ctxext.recipes.param import SearchRange, param


class Relation(Reaching, CodeMethod):
    """Context length of a relation map, and its temperature for query positions beyond the old length.

    L is the context length that the model reads before this step, after the schedules before it.
    """

    kind: ClassVar[Kind] = "attention"
    code: ClassVar[tuple[Traversable, ...]] = (
        PORTABLE / "relation.py",
        PORTABLE / "relation_maps.py",
        PORTABLE / "relation_parts.py",
    )
    is_published = False

    temperature: str = param(
        "none",
        help="Attention temperature beyond the old length: none, or the rule of YaRN, log-n or Llama 4.",
        choices=("none", "yarn", "logn", "llama4"),
    )

    def reference_length(self, encoding: Encoding) -> int:
        """Return the length in tokens that the factor multiplies: that before this step."""
        return encoding.context_length

    def check_target(self, target: int, length: int) -> None:
        """Raise if the target length is below the reference length, or not the one that the factor gives."""
        if self.factor and target != round(self.factor * length):
            raise CtxextError(
                f"A factor of {self.factor:g} and a target length of {target} disagree: "
                f"the context length before this step is {length}.",
                hint="Use only one of --factor and --target-length.",
            )
        if target < length:
            raise CtxextError(
                f'The target length "{target}" is below the current context length of {length} tokens.',
                hint=f"Choose a longer one, for example --target-length {4 * length}.",
            )

    @override
    def resolve(self, encoding: Encoding) -> Self:
        length = self.reference_length(encoding)
        step = dataclasses.replace(super().resolve(encoding), target_length=None)
        step = dataclasses.replace(step, **{k: v for k, v in step.defaults(length).items() if getattr(step, k) is None})
        if problem := step.problem(length, step.length_after(encoding)):
            raise CtxextError(f"{self.name}: {problem[0]}", hint=problem[1])
        return step

    def defaults(self, length: int) -> dict[str, Any]:
        """Return the defaults that depend on L, by option."""
        return {}

    @classmethod
    @override
    def search_space(cls, rotary: Rotary, factor: float) -> dict[str, SearchRange]:
        # Useful windows depend on L: they range from L / 32 to L / 2.
        ranges, length = super().search_space(rotary, factor), rotary.context_length
        if "window" in ranges:
            start = cls(factor=factor).defaults(length)["window"]
            ranges["window"] = SearchRange((max(length // 32, 1), max(length // 2, 2)), start)
        return ranges

    @classmethod
    @override
    def from_search(cls, numbers: Mapping[str, Any], rotary: Rotary, factor: float) -> Self:
        return cls(**{**numbers, "factor": factor})

    def problem(self, length: int, target: int) -> tuple[str, str] | None:
        """Return an error and a hint if the options cannot extend L to the target; None if they can."""
        return None

    @override
    def summary(self) -> str:
        return super().summary() + (f" ({self.temperature})" if self.temperature != "none" else "")

    @override
    def settings(self, model: ModelConfig) -> dict[str, Any]:
        if model.rotary.rope_type == "dynamic":  # Its formula also depends on the length that the map raises.
            raise CtxextError(
                f"{self.name} depends on the query position and cannot be combined with this model's "
                "dynamic schedule, which depends on the input length.",
                hint="Use adaptive, the per-position form of dynamic, on a copy without the schedule.",
            )
        layers = rotated_layers(model.config, model.family)
        if not layers:
            raise CtxextError(
                f"Every layer with a rotary embedding has a sliding window, which {self.name} would not widen."
            )
        length = model.rotary.context_length
        step = self.resolve(model.rotary)
        numbers = {name: value for name, value in step.to_dict().items() if name not in _NOT_IN_MAPS}
        lengths = {"original_length": length, "target_length": step.length_after(model.rotary)}
        return {"layers": layers, **lengths, "temperature": self.temperature, **numbers}


_NOT_IN_MAPS = frozenset({"method", "factor", "temperature"})


def require(parameter: int | None) -> int:
    """Return a parameter of a resolved step, which `defaults` has filled in."""
    assert parameter is not None, "resolve the step first"
    return parameter


def window_problem(window: int, length: int) -> tuple[str, str] | None:
    """Return an error and a hint if a window leaves nothing to regroup; otherwise None."""
    if window >= length:
        return f'a window of "{window}" is not below the context length of {length} tokens.', f"--window {length // 8}"
    return None
