"""LlamaForCausalLM with Row-wise schedule; each method is in a file of its own."""

from .method import __name__ as _method
from .modeling_family import family
from .private_copy import __name__ as _private_copy
from .relation import Adaptive
from .relation_maps import __name__ as _relation_maps
from .relation_parts import __name__ as _relation_parts

modeling = family(__name__, "transformers.models.llama.modeling_llama", [Adaptive])


class CtxextLlamaModel(modeling.LlamaModel):
    """LlamaModel with Row-wise schedule."""


class CtxextLlamaForCausalLM(modeling.LlamaForCausalLM):
    """LlamaForCausalLM with Row-wise schedule."""


CtxextLlamaForCausalLM.register_for_auto_class("AutoModelForCausalLM")
CtxextLlamaModel.register_for_auto_class("AutoModel")
