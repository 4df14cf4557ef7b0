"""A longer memory of earlier segments, for XLNet."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from typing_extensions import override

from ctxext.errors import CtxextError
from ctxext.recipes.base import Method
from ctxext.recipes.encodings.base import Encoding
from ctxext.recipes.encodings.memory import Memory
from ctxext.recipes.model_config import ModelConfig
from ctxext.recipes.param import param


class LongerMemory(Method):
    """Keep more states of earlier segments. No training.

    Multiplies mem_len of XLNet, or sets it. The distances of these states are computed for any length. A program that
    reads segments passes the returned mems to the next call. Transformer-XL (1901.02860), section 3.2.
    """

    name = "memory"
    title = "Longer memory"
    paper = "https://arxiv.org/abs/1901.02860"
    kind = "memory"
    encoding = "memory"
    is_published = False
    neutral: ClassVar[Mapping[str, Any]] = {"factor": 1}
    example: ClassVar[Mapping[str, Any]] = {"factor": 4}
    caution = (
        "only texts that are read in segments change, from the first segment beyond the old memory on: pass the mems "
        "that the model returns to its next call. Distances beyond those of the training are untrained."
    )

    factor: float | None = param(None, help="Scaling factor of the context length.", min=1.0)
    mem_len: int | None = param(
        None, help="Number of states of earlier segments, instead of --factor.", kind="length", min=1
    )

    @override
    def resolve(self, encoding: Encoding) -> Self:
        if not isinstance(encoding, Memory):
            return self  # `edit` refuses it.
        if (self.factor is None) == (self.mem_len is None):
            given = (
                "either a factor or a number of states, not both" if self.factor else "a factor or a number of states"
            )
            raise CtxextError(f"memory needs {given}.", hint="Use --factor 4 or --mem-len 2048.")
        if self.factor is None:
            return self
        if not encoding.is_limited:
            raise CtxextError(
                "config.json sets no mem_len that --factor could multiply: the model keeps all states.",
                hint=f"Limit them with --mem-len {4 * encoding.trained_length}.",
            )
        return dataclasses.replace(self, factor=None, mem_len=round(self.factor * encoding.trained_length))

    @override
    def length_after(self, encoding: Encoding) -> int:
        return self.mem_len or encoding.context_length  # A step for another encoding is not resolved.

    @override
    def summary(self) -> str:
        return self.name + (f" ×{self.factor:g}" if self.factor else f" of {self.mem_len} states")

    @override
    def edit(self, model: ModelConfig) -> ModelConfig:
        if reason := self.refusal(model.config, model.family):
            raise CtxextError(
                f'"{model.family.model_type}" has no memory to extend: {reason}.',
                hint="ctxext inspect MODEL lists the methods that apply.",
            )
        return model.with_context_length(self.resolve(model.encoding).length_after(model.encoding))
