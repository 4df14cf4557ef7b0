"""Wider buckets of distances, for T5 and its kin."""

import dataclasses
from dataclasses import dataclass

from ctxext.errors import CtxextError
from ctxext.recipes.base import Reaching
from ctxext.recipes.encodings.biases import Buckets
from ctxext.recipes.encodings.rotary import ModelConfig


@dataclass(frozen=True, kw_only=True)
class WiderBuckets(Reaching):
    """Tell distances apart farther out in T5 and its kin, and more coarsely on the way. Meant to be trained a little.

    relative_attention_max_distance, from which on all distances share a bucket, times the factor. T5 (1910.10683),
    section 2.1.
    """

    name = "buckets"
    title = "Wider buckets of distances"
    paper = "https://arxiv.org/abs/1910.10683"
    kind = "buckets"
    encoding = "buckets"
    is_published = False
    is_experimental = True

    def caution_for(self, model: ModelConfig) -> str:
        """That nothing was wrong before, that nothing was measured, and which inputs change."""
        assert isinstance(model.encoding, Buckets)
        return (
            "no distance was out of range before, as far ones share a bucket: any length ran. What wider buckets gain "
            f"was not measured; inputs of more than {model.encoding.num_buckets // 4} tokens change, so train a little "
            "and measure before and after."
        )

    def edit(self, model: ModelConfig) -> ModelConfig:
        """Write the distance and the length.

        Raises:
            CtxextError: the model has no buckets.
        """
        if reason := self.refusal(model.config, model.family):
            raise CtxextError(
                f'"{model.family.model_type}" has no buckets to widen: {reason}.',
                hint="ctxext inspect MODEL lists the methods that apply.",
            )
        old = model.encoding
        assert isinstance(old, Buckets)
        step = self.resolved(old)
        wider = dataclasses.replace(old, distance=round(step.stretch * old.distance), context_length=step.reach(old))
        return model.with_encoding(wider)
