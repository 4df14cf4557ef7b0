"""Gemma2ForCausalLM with Self-Extend; each method is in a file of its own."""

from .method import __name__ as _method
from .modeling_family import family
from .private_copy import __name__ as _private_copy
from .relation import SelfExtend
from .relation_maps import __name__ as _relation_maps
from .relation_parts import __name__ as _relation_parts

modeling = family(__name__, "transformers.models.gemma2.modeling_gemma2", [SelfExtend])


class CtxextGemma2Model(modeling.Gemma2Model):
    """Gemma2Model with Self-Extend."""


class CtxextGemma2ForCausalLM(modeling.Gemma2ForCausalLM):
    """Gemma2ForCausalLM with Self-Extend."""


CtxextGemma2ForCausalLM.register_for_auto_class("AutoModelForCausalLM")
CtxextGemma2Model.register_for_auto_class("AutoModel")
