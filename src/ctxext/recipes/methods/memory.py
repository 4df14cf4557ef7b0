"""A longer memory of earlier segments, for XLNet."""

from typing_extensions import override

from ctxext.checkpoint.families import Family
from ctxext.errors import CtxextError
from ctxext.recipes.base import Reaching
from ctxext.recipes.encodings.base import Config
from ctxext.recipes.encodings.memory import has_memory
from ctxext.recipes.model_config import ModelConfig


class LongerMemory(Reaching):
    """Keep more states of earlier segments. No training.

    Multiplies mem_len of XLNet, or sets it to the target length. The distances of these states are computed for any
    length. A program that reads segments passes the returned mems to the next call. Transformer-XL (1901.02860),
    section 3.2.
    """

    name = "memory"
    title = "Longer memory"
    paper = "https://arxiv.org/abs/1901.02860"
    kind = "memory"
    encoding = "memory"
    is_published = False
    caution = (
        "only texts that are read in segments change, from the first segment beyond the old memory on: pass the mems "
        "that the model returns to its next call. Distances beyond those of the training are untrained."
    )

    @classmethod
    @override
    def refusal(cls, config: Config, family: Family) -> str:
        if reason := super().refusal(config, family):
            return reason
        return "" if has_memory(config, family) else f"{family.length_key} is not set, so it keeps the states of all"

    @override
    def edit(self, model: ModelConfig) -> ModelConfig:
        if reason := self.refusal(model.config, model.family):
            raise CtxextError(
                f'"{model.family.model_type}" has no memory to extend: {reason}.',
                hint="ctxext inspect MODEL lists the methods that apply.",
            )
        return model.with_context_length(self.resolve(model.encoding).length_after(model.encoding))
