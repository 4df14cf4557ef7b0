"""Wider buckets of distances, for T5, DeBERTa and related models."""

import dataclasses

from typing_extensions import override

from ctxext.checkpoint.families import Family
from ctxext.errors import CtxextError
from ctxext.recipes.base import Reaching
from ctxext.recipes.encodings.base import Config
from ctxext.recipes.encodings.biases import Buckets, read_buckets
from ctxext.recipes.model_config import ModelConfig


class WiderBuckets(Reaching):
    """Widen buckets of distances, to distinguish farther tokens. Meant for a short fine-tune.

    Multiplies the distance beyond which all share one bucket by the factor: relative_attention_max_distance of T5-style
    models, max_relative_positions of DeBERTa v2 and v3. Use it for models that must distinguish far tokens; they accept
    any length already. T5 (1910.10683), section 2.1; DeBERTa (2006.03654).
    """

    name = "buckets"
    title = "Wider buckets of distances"
    paper = "https://arxiv.org/abs/1910.10683"
    kind = "buckets"
    encoding = "buckets"
    is_published = False
    is_experimental = True

    @classmethod
    @override
    def refusal(cls, config: Config, family: Family) -> str:
        if reason := super().refusal(config, family):
            return reason
        return read_buckets(config, family).flaw

    @override
    def caution_for(self, model: ModelConfig) -> str:
        assert isinstance(model.encoding, Buckets)
        return (
            "the source supports any length, as far distances share a bucket, and the benefit of wider buckets is not "
            "measured, except for a small DeBERTa-like encoder, which had none; inputs of more than "
            f"{model.encoding.num_exact} tokens change, so fine-tune briefly and measure before and after."
        )

    @override
    def edit(self, model: ModelConfig) -> ModelConfig:
        if reason := self.refusal(model.config, model.family):
            raise CtxextError(
                f'"{model.family.model_type}" has no buckets to widen: {reason}.',
                hint="ctxext inspect MODEL lists the methods that apply.",
            )
        old = model.encoding
        assert isinstance(old, Buckets)
        step = self.resolve(old)
        wider = dataclasses.replace(
            old, distance=round(step.scaling_factor * old.distance), context_length=step.length_after(old)
        )
        return model.with_encoding(wider)
