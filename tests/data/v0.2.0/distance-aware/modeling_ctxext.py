"""LlamaForCausalLM with Distance-aware attention; each method is in a file of its own."""

from .distance import DistanceAware
from .method import __name__ as _method
from .modeling_family import family
from .private_copy import __name__ as _private_copy
from .relation_parts import __name__ as _relation_parts

modeling = family(__name__, "transformers.models.llama.modeling_llama", [DistanceAware])


class CtxextLlamaModel(modeling.LlamaModel):
    """LlamaModel with Distance-aware attention."""


class CtxextLlamaForCausalLM(modeling.LlamaForCausalLM):
    """LlamaForCausalLM with Distance-aware attention."""


CtxextLlamaForCausalLM.register_for_auto_class("AutoModelForCausalLM")
CtxextLlamaModel.register_for_auto_class("AutoModel")
