"""A longer declared context, for models without positions in their full-attention layers."""

from typing_extensions import override

from ctxext.checkpoint.families import NOTHING_TO_EXTEND, Family
from ctxext.errors import CtxextError
from ctxext.recipes.base import Reaching
from ctxext.recipes.encodings.base import POSITIONS, Config
from ctxext.recipes.encodings.no_positions import has_length
from ctxext.recipes.model_config import ModelConfig


class Declare(Reaching):
    """Raise the declared context length of a model without positions over long distances. Nothing else changes.

    For models with full attention that does not rotate (Nemotron 3, Granite 4 H, Jamba, Kimi Linear, Llama 4, Cohere 2,
    EXAONE 4): no position is out of range, but engines and tokenizers stop at the declared length. Raises it in
    config.json, the generation config and the tokenizer. Kazemnejad et al. 2023 (NoPE).
    """

    name = "declare"
    title = "Declared length"
    paper = "https://arxiv.org/abs/2305.19466"
    kind = "length"
    encoding = "none"
    is_published = False
    caution = (
        "only the declared length changed, and nothing was learned. Whether the model uses longer inputs depends on "
        "its training: measure it with ctxext eval."
    )

    @classmethod
    @override
    def refusal(cls, config: Config, family: Family) -> str:
        if family.encoding != cls.encoding:
            return f"it has {POSITIONS[family.positions]}, which a longer length alone does not extend"
        if family.reason and family.reason != NOTHING_TO_EXTEND:
            return family.reason
        return "" if has_length(config, family) else "config.json contains no context length"

    @override
    def edit(self, model: ModelConfig) -> ModelConfig:
        if reason := self.refusal(model.config, model.family):
            raise CtxextError(
                f'"{model.family.model_type}" cannot be extended by {self.name}: {reason}.',
                hint="ctxext inspect MODEL lists the methods that apply.",
            )
        return model.with_context_length(self.resolve(model.encoding).length_after(model.encoding))
